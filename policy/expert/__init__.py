"""The scripted expert: solves LIBERO-Goal's ten tasks from the simulator's own state.

It is the control arm of experiments and the source of demonstrations, not a policy for a real robot.
"""

from dayshift.policy.expert.expert import ScriptedExpert

__all__ = ["ScriptedExpert"]
