"""Attacks on the commit protocol: kills, power cuts, faults and broken designs.

`disks` and `power` hold doubles of `mmreplay.disk.files.disk`; `kills` and `powerloss`
drive the real buffer through them, and look by `groups` at what others are told;
`mutants` removes one rule of the protocol at a time and asks whether the attacks
notice. Run ``python -m tools.torture --help``.
"""
