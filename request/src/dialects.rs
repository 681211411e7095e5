//! Other systems' ways to write a request, one file each. None knows another: each says which words are its own and what
//! they mean, and the merge compares what they said.

use crate::cards::Cards;
use crate::claim::Claim;
use crate::error::RequestError;
use crate::reading::Reading;

mod aliyun;
mod aliyun_off;
mod elastic;
mod hami;
mod kai;
mod koordinator;
mod nvfractions;
mod nvidia_mps;
mod nvshare;
mod pai_egpu;
mod slurm;
mod slurm_mps;
mod slurm_shard;
mod tke_vcuda;
mod vgpu_manager;
mod volcano_legacy;

/// One way to write a request.
pub(crate) struct Dialect {
    /// Its name in settings and listings.
    pub name: &'static str,
    /// Whether the bundle speaks it. Looks at nothing but the bundle: most containers ask for nothing.
    pub detects: fn(&Reading) -> bool,
    /// What it says.
    pub read: for<'a> fn(&Reading<'a>, Cards<'a>) -> Result<Vec<Claim>, RequestError>,
    /// The keys, of variables and annotations, that no later dialect may take for its own.
    pub owns: fn(&str) -> bool,
    /// Whether its limits may count by a GPU's place in the list.
    pub by_position: bool,
}

/// In the order of detection: a dialect that uses another's keys stands before it. Slurm and NvFractions use those of MPS, both
/// Koordinator and KAI HAMi's; the former of each is known by what a bundle's author cannot take away, the latter by a
/// variable that anybody may write.
pub(crate) static DIALECTS: [&Dialect; 15] = [
    &slurm_mps::DIALECT,
    &nvfractions::DIALECT,
    &koordinator::DIALECT,
    &kai::DIALECT,
    &vgpu_manager::DIALECT,
    &hami::DIALECT,
    &pai_egpu::DIALECT,
    &aliyun_off::DIALECT,
    &aliyun::DIALECT,
    &tke_vcuda::DIALECT,
    &elastic::DIALECT,
    &volcano_legacy::DIALECT,
    &slurm_shard::DIALECT,
    &nvshare::DIALECT,
    &nvidia_mps::DIALECT,
];

impl std::fmt::Debug for Dialect {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The dialects that the bundle speaks, less those that the settings leave out.
pub(crate) fn spoken(reading: &mut Reading) -> Vec<&'static Dialect> {
    let mut spoken = Vec::new();
    for dialect in DIALECTS {
        let unread = reading.policy.unread_dialects.iter().any(|name| name == dialect.name);
        if !unread && (dialect.detects)(reading) {
            reading.take(dialect.owns);
            spoken.push(dialect);
        }
    }
    spoken
}

/// The names of all dialects, for settings.
pub fn names() -> impl Iterator<Item = &'static str> {
    DIALECTS.iter().map(|dialect| dialect.name)
}
