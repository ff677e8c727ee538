"""How a run is carried out: built from its configuration, folded over rounds."""
