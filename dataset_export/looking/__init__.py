"""Looking at a LeRobot v3.0 dataset: episodes read back for a page, for Rerun and for Foxglove.

`dataset.Dataset` reads episodes; `pictures` decodes one picture exactly; `encoded` hands pictures on as
they were encoded; `rerun_file` and `mcap_file` write one episode for those viewers.
"""
