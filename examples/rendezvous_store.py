"""The store through which torchrun's agents meet, on a machine that does not train, so that any other can be lost.

python examples/rendezvous_store.py 29400            on store-host
torchrun --rdzv-backend c10d --rdzv-endpoint store-host:29400 ...            on each machine that trains
"""

import sys
import time

from torch.distributed import TCPStore

store = TCPStore("0.0.0.0", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(f"store on port {store.port}", flush=True)
while True:
    time.sleep(3600)
