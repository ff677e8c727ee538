"""A plain PyTorch loop over devices, as one would write it."""

import copy

import torch
from common import CLASSES, HIDDEN, INPUTS, STEPS, Workload
from torch import nn

work = Workload()
features, targets = torch.tensor(work.features), torch.from_numpy(work.targets)
model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))
with torch.no_grad():
    for parameter, value in zip(model.parameters(), work.layers(work.start), strict=True):
        parameter.copy_(torch.from_numpy(value))

for t in range(work.rounds):
    work.mark()
    batches = torch.from_numpy(work.batches[t])
    ends = []
    for batch_of_step in batches:
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=float(work.lr[t]))
        for k in range(STEPS):
            batch = batch_of_step[k % len(batch_of_step)]
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(local(features[batch]), targets[batch])
            loss.backward()
            optimiser.step()
        ends.append(local.state_dict())
    model.load_state_dict({name: sum(end[name] for end in ends) / len(ends) for name in ends[0]})
work.mark()
work.report([parameter.detach().numpy() for parameter in model.parameters()])
