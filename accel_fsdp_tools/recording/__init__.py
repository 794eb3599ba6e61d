"""What a rehearsal sees and does inside the script that it runs: see `rehearsal`.

`join` is all that the rest of the package calls. Outside of a rehearsal it returns None, and everything it would have
done costs the caller one comparison.
"""

from .recorder import Recorder, RehearsalEnd, join

__all__ = ["Recorder", "RehearsalEnd", "join"]
