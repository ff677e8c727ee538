"""`python -m otafl` is the command `otafl`.

Knows: the command line.
Does not know: anything else.
"""

from otafl.cli import main

main()
