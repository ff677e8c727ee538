"""`python -m otafl` is the command `otafl`.

Knows: the command line.
Does not know: what the commands do.
"""

from otafl.cli import main

main()
