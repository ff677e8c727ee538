"""The FedOAG paper: its figures, claims, tables, theory and open problems."""
