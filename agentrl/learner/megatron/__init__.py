"""The Megatron-Core learner: models, conversion of weights, parallel layouts."""

import warnings

# It warns of packages that it can do without, and of its own uses of its own deprecated options.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
