"""The Megatron-Core learner: models, conversion of weights, parallel layouts."""

import warnings

# It warns of packages that it can do without, and of options that it sets itself and calls deprecated.
warnings.filterwarnings("ignore", module=r"megatron\.core\.")
