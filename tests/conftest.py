"""What every test may rely on: one thread a process, no network for models, no time limits on single generated examples."""

from __future__ import annotations

import os

# Before torch or numpy is imported anywhere: their thread pools are sized at import.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import settings  # noqa: E402

settings.register_profile("rolemesh", deadline=None, print_blob=True)
settings.load_profile("rolemesh")
