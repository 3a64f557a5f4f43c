"""A storm: real members, faults drawn from a seed, contents derived from the version, a checker in every engine.

    python -m tests.process.storm --transport shm --mode shadow --versions 500 --seed 7

settings    what is stormed: transport, mode, sizes, deadlines
contents    the weights of a version, and where an array differs from them
gate        the observation point in a trainer's writes: report, stop or end there
wires       the control connections of members, each of which can be held
members     the processes: trainer, engine, controller
fleet       all processes of a storm, and the journal of what they said
faults      what can happen, as sequences
verdicts    what must never happen
report      tables, JSON, the journal of a seed that failed
"""
