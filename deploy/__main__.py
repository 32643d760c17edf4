"""`python -m deploy`: the `headrace` command."""

from deploy.cli import main

if __name__ == "__main__":
    main()
