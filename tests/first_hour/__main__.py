"""`python -m tests.first_hour`: the first hour of a new user, from the wheel."""

import sys

from tests.first_hour.play import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
