"""Pure planning: no processes, no sockets, no torch.

case, planner, plan_fit      from what a user types, or members report, to a proven plan
assign, shares               who sends, when several ranks hold the same bytes
layout, recipe, topology     who holds what, how engine tensors are made of it, what the bytes travel over
version                      the life of a version, as a state machine
models/                      from a `config.json` to the tensors of a checkpoint
layouts/                     layouts and recipes from texts, files and traced loaders
plans/                       the Plan, its proof, bound, schedule, memory and files
streams/                     what travels on each link, cut into Chunks
geometry/                    boxes and planes as columns of numbers
"""
