"""``python -m integration.sampling CHECKPOINT``: samples images or text from a checkpoint."""

import sys

from integration.sampling.command import main

sys.exit(main())
