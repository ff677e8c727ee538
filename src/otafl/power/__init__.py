"""Power control: from what is known of the channels to transmit scales, as pure functions on arrays."""
