"""Made-up GPU jobs with known faults, written as the Chrome traces that torch.profiler would record.

    job = moe_training()                        a healthy program for each rank (jobs.py)
    FAULTS["late launch"].apply(job, 2)         the same with one fault (switches.py)
    run(job)                                    when everything happened (machine.py)
    write_traces(run(job), folder)              one file a rank (chrome.py)

The true gain of a repair is the difference between two runs of the machine. Nothing here imports the code under test.
"""

from .chrome import write_traces
from .machine import Recording, run
from .program import Job, Machine
from .switches import FAULTS, PAIRS, Fault

__all__ = ["FAULTS", "PAIRS", "Fault", "Job", "Machine", "Recording", "run", "write_traces"]
