"""`python -m skilltrain` and `accelerate launch -m skilltrain`."""

from skilltrain.cli import main

main()
