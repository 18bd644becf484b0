"""`python -m spiral_fast`, and so `torchrun -m spiral_fast`: the command `spiral-fast`."""

from spiral_fast.cli import main

main()
