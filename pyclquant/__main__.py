"""`python -m pyclquant`."""

from pyclquant.cli import main

if __name__ == "__main__":
    main()
