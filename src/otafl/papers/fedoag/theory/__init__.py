"""The analysis of the FedOAG paper, and of FedOAG-zero."""
