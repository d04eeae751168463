"""``python -m valueformer``: the command line, for torchrun and for interpreters without scripts on their path."""

from valueformer.cli import main

main()
