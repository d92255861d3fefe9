"""A plan of a fit, on a machine whose rates are given."""

from train.fit.plan import FitPlan, FitRequest, make_plan
from train.fit.probe import Rates

RATES = Rates(alone=50.0, written=150.0, read=500.0, trained=400.0, starting=30.0)
ASKED = FitRequest("model", "float32", 20.0)


def plan_of(minutes: float = 20.0, spent: float = 60.0, rates: Rates = RATES) -> FitPlan:
    asked = ASKED._replace(minutes=minutes)
    return make_plan(asked, spent, rows=48, rates=rates, new_tokens=96, row_tokens=512)
