"""``--device adb[:SERIAL]``: the native runner on a phone, through Android's debug bridge.

client.py calls the adb program; phone.py reads what the phone is and how it fares; store.py keeps
its copies of bundles and runners; transport.py runs jobs.
"""
