"""What a user might try; run by test_xla.py."""

import tfstyle_dist as tfd

tfd.TPUStrategy()
