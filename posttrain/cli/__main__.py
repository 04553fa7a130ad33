"""`python -m posttrain.cli`, where the script is not installed."""

import sys

from posttrain.cli import main

sys.exit(main())
