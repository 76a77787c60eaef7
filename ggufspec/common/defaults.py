"""Every default that a user meets, once, for the library and for the help text. Imports nothing."""

from __future__ import annotations

from typing import Final

# Sampling, as in llama.cpp.
TEMPERATURE: Final = 0.8
TOP_K: Final = 40
TOP_P: Final = 0.95
MIN_P: Final = 0.05
REPEAT_LAST_N: Final = 64
DRY_BASE: Final = 1.75
DRY_ALLOWED_LENGTH: Final = 2
DRY_PENALTY_LAST_N: Final = 64
DRY_SEQUENCE_BREAKERS: Final = ("\n", ":", '"', "*")
SAMPLERS: Final = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "temperature",
)

N_DRAFT: Final = "auto"  # chosen in each round, by what costs and chances are found to be
N_DRAFT_FIXED: Final = 3  # where there is nobody to choose
N_DRAFT_MAX: Final = 16  # what an engine is loaded for
N_DRAFT_LIMIT: Final = 64  # what an engine can be loaded for
N_SLOTS_LIMIT: Final = 64  # texts at the same time
N_PROBED: Final = 8  # tokens that a draft is asked about which others have written
VERIFY: Final = "block"
DRAFT_TEMPERATURE: Final = "auto"

N_CTX: Final = 4096  # or the target's own context, if that is smaller
N_BATCH: Final = 512
N_GPU_LAYERS: Final = "auto"  # chosen by predicted speed, within free memory
ALL_LAYERS: Final = -1
ACCEPTANCE: Final = 0.8  # chance that a drafted token stands, of a pair that nobody has measured
FLASH_ATTENTION: Final = "auto"
KV_TYPE: Final = "f16"
KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

# The demo.
DEMO_SIZE: Final = "250M"
DEMO_TOKENS: Final = 80

# The race.
COMPARE_TOKENS: Final = 160

# The audit.
AUDIT_RUNS: Final = 100  # texts of each kind
AUDIT_TOKENS: Final = 32  # of a text
AUDIT_ALPHA: Final = 0.01  # chance of a false alarm, of the whole audit
AUDIT_NEAR_TIE: Final = 0.05  # logits

# Tuning.
TUNE_DEPTH: Final = 300  # tokens in the cache; llama.cpp's kernels take another step at 256
TUNE_RUNS: Final = 5  # measurements of each pass
TUNE_N_MOST: Final = N_DRAFT_MAX  # drafted tokens

# The server.
SERVE_HOST: Final = "127.0.0.1"
SERVE_PORT: Final = 8080
SERVE_SLOTS: Final = 4  # texts at the same time
SERVE_QUEUE: Final = 32  # requests that wait
SERVE_TIMEOUT: Final = 600.0  # seconds of a request
SERVE_BODY: Final = 2**20  # bytes of a request
SERVE_GRACE: Final = 10.0  # seconds for what runs, when it is told to stop
