"""What a method sees: the contract, the round, states, what is measured."""
