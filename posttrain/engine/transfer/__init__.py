"""WEIGHT SYNC between processes: all tensors of one version, as a parcel that is written whole and then announced.

`parcel` holds the data, the protocols and the errors, `block` the bytes, `sender` and `receiver` the two sides.
Where the bytes lie is a `Carrier`: `shared_memory` (memory of one machine), `shared_folder` (files),
`collective` (torch.distributed). `delta` sends only what changed.
"""
