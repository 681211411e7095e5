//! Alibaba PAI's eGPU: `AMP_VGPU_ENABLE=1`, with bytes per GPU or a part of it, and a percentage of compute
//! (help.aliyun.com, pai/egpu-interface-usage-example).
//!
//! Anybody can set the switch. So if Aliyun's device plugin wrote its index, GPU and part have the plugin's
//! meaning.

use gpushare_inventory::{DeviceMemory, Gpu};

use crate::dialect::{Dialect, Speech};
use crate::dialects::cgpu::{self, Ratio};
use crate::quantity;
use gpushare_claims::{Amount, Claim, NodeGpus, RequestError, Word, Words};

pub(super) static DIALECT: Dialect = Dialect {
    name: "pai-egpu",
    speech: |words| Speech::asking(words.has(SWITCH)),
    read,
    owns,
    over: &["aliyun", "aliyun-off"],
    numbers: cgpu::meaning,
    near_misses: &[(BYTES, "is no request without AMP_VGPU_ENABLE=1")],
    ..Dialect::PLAIN
};

const SWITCH: &str = "AMP_VGPU_ENABLE";
const BYTES: &str = "GPU_MEM_PER_DEVICE";
/// The variable for how many MiB of the stated bytes eGPU keeps for itself, and its default.
const RESERVED: &str = "ALIYUN_COM_GPU_MEM_RESERVED";
const USUALLY_RESERVED: u64 = 10;

fn owns(key: &str) -> bool {
    cgpu::owns(key) || matches!(key, SWITCH | BYTES | "AMP_USE_HOST_DAEMON" | "AMP_VGPU_DEV_COUNT")
}

fn read<'a>(words: &Words<'a>, node: NodeGpus<'a>) -> Result<Vec<Claim>, RequestError> {
    let Some(switch) = words.one(SWITCH)? else { return Ok(Vec::new()) };
    if switch.value != "1" {
        return Err(switch.wrong("eGPU is on with 1 and documents no other value: write 1, or remove it"));
    }
    let (_, chosen) = cgpu::given(words, node, switch)?;
    let reserved = match words.one(RESERVED)? {
        Some(word) => quantity::whole(word.value).ok_or_else(|| word.wrong("the reserve is digits: MiB"))?,
        None => USUALLY_RESERVED,
    };
    let mut claims: Vec<Claim> = chosen.into_iter().collect();
    let ratios = Ratio::read(words)?.into_iter();
    let ratios: Vec<Claim> =
        ratios.map(|ratio| cgpu::memory_claim(words, node, ratio, &node.all())).collect::<Result<_, _>>()?;
    for word in words.named(BYTES) {
        let memory = bytes(word, reserved)?;
        // Aliyun's plugin may have written the ratio, and a pod's bytes must not raise it.
        let least = |_: usize, gpu: &Gpu| {
            let parts = ratios.iter().filter_map(|claim| claim.amount_on(Some(gpu.uuid)).memory?.bytes());
            Ok(Amount::memory(parts.fold(memory, DeviceMemory::min)))
        };
        claims.push(Claim::by(word).on(&node.all(), least)?);
    }
    if !words.has(BYTES) {
        claims.extend(ratios);
    }
    claims.extend(cgpu::caps(words)?);
    Ok(claims)
}

/// Reads the memory in bytes, without the `reserved` MiB that eGPU keeps.
fn bytes(word: Word, reserved: u64) -> Result<DeviceMemory, RequestError> {
    let bytes: u64 = quantity::whole(word.value)
        .ok_or_else(|| word.wrong("memory is digits: bytes without a unit, as 2147483648"))?;
    if bytes < 1 << 20 {
        let meant = if bytes == 0 { "2147483648".to_owned() } else { format!("{}", bytes << 20) };
        return Err(word.wrong(format!("below 1 MiB; it is bytes: did you mean {meant}?")));
    }
    let left = reserved.checked_mul(1 << 20).and_then(|reserved| bytes.checked_sub(reserved));
    let left = left.filter(|left| *left >= 1 << 20).map(DeviceMemory::from_bytes);
    left.ok_or_else(|| {
        word.wrong(format!("less {reserved} MiB of reserve ({RESERVED}) nothing is left: ask for more"))
    })
}
