"""`python -m posttrain`: the command line where its script is not on the PATH."""

import sys

from posttrain.cli import main

sys.exit(main())
