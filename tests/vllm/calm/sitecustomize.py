"""Makes vLLM's processes wait for each other asleep. Python runs this at start where the folder is on PYTHONPATH.

They wait by yielding in a loop. On two cores, under Linux 6.18, that was seen to keep every other process off them for
a minute at a time, the one that they waited for included.
"""

import os
import time

os.sched_yield = lambda: time.sleep(1e-4)
