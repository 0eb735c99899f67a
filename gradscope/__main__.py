"""``python -m gradscope``, for torchrun: ``torchrun --nproc-per-node 2 -m gradscope train ...``."""

from gradscope.cli import main

if __name__ == "__main__":
    main()
