"""PyTorch within a share: what torch.cuda sees, a small training loop, and what happens at the limit."""

import torch

MIB = 1 << 20


def tell(what):
    free, total = torch.cuda.mem_get_info()
    print(f"{what}: {free // MIB} of {total // MIB} MiB free, torch holds {torch.cuda.memory_reserved() // MIB} MiB")


def train(steps=200):
    """Fits a small network to a sine; returns the first and the last loss."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(1, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.linspace(-3, 3, 4096, device="cuda").unsqueeze(1)
    losses = []
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def beyond_the_share():
    """Asks for one byte more than the GPU has, as this container sees it."""
    total = torch.cuda.mem_get_info()[1]
    try:
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        return "refused: torch.cuda.OutOfMemoryError"
    return "granted: nothing limits this container"


if __name__ == "__main__":
    print(f"{torch.cuda.device_count()} GPU: {torch.cuda.get_device_name()}")
    tell("at the start")
    first, last = train()
    print(f"loss from {first:.3f} to {last:.3f}")
    tell("after training")
    print("more than the share,", beyond_the_share())
