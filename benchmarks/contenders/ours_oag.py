"""This library: FedOAG, every device with a model of its own and trained in every round."""

from pathlib import Path

exec(compile((Path(__file__).parent / "ours.py").read_text(encoding="utf-8"), "ours.py", "exec"))
