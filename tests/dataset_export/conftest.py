import sys
from pathlib import Path

# The tests' own helpers (recording_samples, ...) are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))
