"""`python -m reference.golden make|check`: see reference/golden_data.py."""

import sys

from reference.golden_data import main

sys.exit(main())
