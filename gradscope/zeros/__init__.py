"""Why the gradient of one batch is exactly zero, entry by entry, for anybody's model.

    from gradscope.zeros import account

``accounting`` counts, from what ``evidence`` makes of the passes that ``counterfactual`` runs, in wider dtypes on a copy (``widened``);
``words`` says it, and ``encoder_batch`` is the same for an encoder or a run of ours.
"""

from gradscope.zeros.accounting import Accounting, Tally, account
from gradscope.zeros.counterfactual import Pass

__all__ = ["Accounting", "Pass", "Tally", "account"]
