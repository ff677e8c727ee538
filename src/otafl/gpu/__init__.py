"""Kernels for the vectors of the devices in a mask, and whether Triton can be used at all."""

import os

import torch


def need_triton() -> None:
    """Raise ImportError where loading Triton would be in vain: it costs 70 MB and a quarter of a second."""
    if torch.version.cuda is None and torch.version.hip is None and "TRITON_INTERPRET" not in os.environ:
        raise ImportError("this PyTorch is for a CPU")
