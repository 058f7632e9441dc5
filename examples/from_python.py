"""The same from Python: load a model over all ranks, look at a loss and a gradient, train it a little, generate.

    mpitp launch -n 2 -- examples/from_python.py MODEL_DIR

MODEL_DIR is a Hugging Face directory with a tokenizer, such as runs/quickstart/model.
"""

import sys

import numpy as np

from mpitp.checkpoint import load_model
from mpitp.comm import make_mesh, world_group
from mpitp.data.tokenizer import load_tokenizer
from mpitp.infer.generate import generate
from mpitp.infer.sampling import Sampling
from mpitp.layers import make_site
from mpitp.models import Batch
from mpitp.optim.adamw import AdamW, AdamWSettings
from mpitp.train.step import TrainStep


def main(directory: str) -> None:
    world = world_group()  # all ranks of this job; one rank when started alone
    mesh = make_mesh(world)  # tp: all of them
    model = load_model(directory, make_site(mesh))  # every rank reads its own slices
    tokenizer = load_tokenizer(directory)

    text = tokenizer.encode("The value of the expression is the value of the name.")
    tokens = np.array([text])  # [b, s], the same on every rank
    batch = Batch.of_rows(tokens[:, :-1], targets=tokens[:, 1:])

    summed_loss, ctx = model.loss_forward(batch)
    model.loss_backward(ctx, scale=1 / batch.num_targets)
    name, param = next(iter(model.named_params()))
    print(f"rank {world.rank} of {world.size}: {name} {param.data.shape}, |grad| {np.abs(param.grad).max():.2e}")
    model.zero_grad()

    step = TrainStep(model, AdamW(model.named_params(), AdamWSettings()), clip_norm=1.0)
    losses = [step([batch], lr=1e-3).loss for _ in range(5)]

    prompt = tokenizer.encode("The value of")
    done = generate(model, [prompt], max_new_tokens=40, sampling=Sampling(temperature=0.5, seed=1))
    if world.rank == 0:
        print(f"loss before: {summed_loss / batch.num_targets:.3f}, of five steps: {[round(x, 3) for x in losses]}")
        print("The value of" + tokenizer.decode_after(prompt, done[0].tokens))


if __name__ == "__main__":
    import course

    course.tidy_ctrl_c()
    main(sys.argv[1])
