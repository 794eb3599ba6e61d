"""A rehearsal of a resume: a script is run without a break, then killed and resumed, and the two are compared.

The script is the user's own, unchanged, in processes of its own. `orders` reach it in one environment variable;
`recording` (a package of its own, inside those processes) obeys them and writes `records`. Here are the two ends that
need no torch: `rehearse` starts the runs, `compare` and `causes` say what differs first and why.
"""
