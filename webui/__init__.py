"""The live page: a run's simulators, planner, engine and machine on one clock, live and in replay.

`publisher` and `monitor` run beside the robots' loops and never slow them; everything else runs in
the page's own process. Reading order: `feed`, then `run_index` (what is known of a run), `pictures`
(which picture belongs to a moment), `queries` (what a page may ask), `server`.
"""
