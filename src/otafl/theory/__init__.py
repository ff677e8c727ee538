"""The paper's analysis as running code."""
