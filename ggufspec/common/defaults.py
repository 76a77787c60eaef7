"""The defaults of the library; cli/options.toml has those of the command line alone."""

from __future__ import annotations

from typing import Final

# Sampling, as in llama.cpp; decoding.sampling_options has the numeric defaults.
DRY_SEQUENCE_BREAKERS: Final = ("\n", ":", '"', "*")
SAMPLERS: Final = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
)

N_DRAFT: Final = "auto"  # chosen in each round, by measured costs and acceptance rates
N_DRAFT_FIXED: Final = 3  # where "auto" is not available
N_DRAFT_MAX: Final = 16  # longest draft that an engine reserves memory for
N_DRAFT_LIMIT: Final = 64  # highest accepted value of N_DRAFT_MAX
N_SLOTS_LIMIT: Final = 64  # concurrent texts
VERIFY: Final = "traversal"
TREE: Final = "auto"  # branches where they pay, by measured costs and acceptance rates
TREES: Final = ("auto", "on", "off")

N_CTX: Final = 4096  # or the context length in the target's file, if that is smaller
N_BATCH: Final = 512
N_GPU_LAYERS: Final = "auto"  # by predicted speed, within free memory
ALL_LAYERS: Final = -1
ACCEPTANCE: Final = 0.8  # acceptance rate of an unmeasured pair
FLASH_ATTENTION: Final = "auto"
KV_TYPE: Final = "f16"
# Tokens of earlier texts kept for n-gram drafting [judgement: 2 MB; some days' texts of one user].
N_REMEMBERED: Final = 2**18
CTX_CHECKPOINTS: Final = 8  # recurrent states kept per slot: 150 MB each for a 27 B model
CACHE_RAM: Final = 8192  # maximum MiB for texts that have left their slots, as in llama-server
KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")

# The demo.
DEMO_SIZE: Final = "250M"

# The audit.
AUDIT_RUNS: Final = 100  # texts of each kind
AUDIT_TOKENS: Final = 32  # tokens per text
AUDIT_ALPHA: Final = 0.01  # probability of a false alarm in the whole audit
AUDIT_NEAR_TIE: Final = 0.05  # difference of logits

# Tuning.
TUNE_DEPTH: Final = 300  # tokens in the cache; kernels of llama.cpp change at 256
TUNE_RUNS: Final = 5  # measurements of each pass
TUNE_N_MOST: Final = N_DRAFT_MAX  # drafted tokens

# The server.
SERVE_SLOTS: Final = 4  # concurrent texts
SERVE_QUEUE: Final = 32  # waiting requests
SERVE_TIMEOUT: Final = 600.0  # seconds for a request
SERVE_BODY: Final = 2**20  # maximum bytes of a request
SERVE_BODY_IMAGES: Final = 2**26  # the same, of a model that reads images
