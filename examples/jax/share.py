"""JAX within a share: the devices, a product, and how much of the GPU JAX has reserved."""

import jax
import jax.numpy as jnp

MIB = 1 << 20

for device in jax.devices():
    print(device.platform, device.device_kind)

left = jax.random.normal(jax.random.key(1), (1024, 1024))
product = jax.jit(jnp.matmul)(left, left.T)
print("product", "right" if bool(jnp.all(jnp.isfinite(product))) else "wrong")

# None on a CPU, and with XLA_PYTHON_CLIENT_ALLOCATOR=platform.
told = jax.devices()[0].memory_stats() or {}
for name in ("bytes_limit", "bytes_reserved", "bytes_in_use"):
    if name in told:
        print(name, told[name] // MIB, "MiB")
