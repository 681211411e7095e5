//! What pods ask for by countable resources, and what that is on a node that serves some of them. Pure.

use std::collections::BTreeMap;

use gpushare_placement::{GPUS, Memory, Models, Needs, Part, Share};
use gpushare_request::kubernetes_quantity;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::resource::{Counted, Resource, System, Unit, is_known};

/// Amounts by the name of the resource.
pub type Amounts = BTreeMap<String, u64>;

/// What one container asks for; nothing by resources that gpushare does not know.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Asking {
    /// The container's name.
    pub container: String,
    /// How much of each resource.
    pub amounts: Amounts,
    /// Of how many GPUs, where the amounts do not say.
    pub gpus: u8,
    /// Whether the container ends before those of the pod begin that are no init containers, and no sidecar
    /// with a GPU runs beside it.
    pub ends_first: bool,
}

/// What the containers of a pod ask for that ask for anything, in the pod's order: init containers first.
pub fn asking(pod: &Pod) -> Vec<Asking> {
    let spec = pod.spec.iter();
    let init = spec.clone().flat_map(|spec| spec.init_containers.iter().flatten()).map(|its| (its, true));
    let all = init.chain(spec.flat_map(|spec| &spec.containers).map(|its| (its, false)));
    let gpus = gpus(pod);
    // One that is restarted is a sidecar.
    let is_sidecar = |container: &Container| container.restart_policy.as_deref() == Some("Always");
    let has_sidecar = all.clone().any(|(container, is_init)| {
        is_init && is_sidecar(container) && !amounts(container, is_known).is_empty()
    });
    let asked = all.map(|(container, is_init)| Asking {
        gpus,
        container: container.name.clone(),
        amounts: amounts(container, is_known),
        ends_first: is_init && !is_sidecar(container) && !has_sidecar,
    });
    asked.filter(|asking| !asking.amounts.is_empty()).collect()
}

/// What one container of a pod asks for of these resources.
pub fn of(pod: &Pod, container: &Container, resources: &[Resource]) -> Asking {
    let amounts = amounts(container, |name| resources.iter().any(|known| known.name == name));
    Asking { container: container.name.clone(), amounts, gpus: gpus(pod), ends_first: false }
}

/// The label of Alibaba's ACK that says of how many GPUs each container of the pod is to have a part.
pub const GPU_COUNT: &str = "aliyun.com/gpu-count";

/// Of how many GPUs each container of the pod is to have a part.
fn gpus(pod: &Pod) -> u8 {
    let label = pod.metadata.labels.as_ref().and_then(|labels| labels.get(GPU_COUNT));
    let count = label.and_then(|text| text.parse::<u8>().ok());
    count.filter(|count| (1..=GPUS).contains(&usize::from(*count))).unwrap_or(1)
}

/// Why a node does not give parts of several GPUs of this resource.
pub fn unsplit(name: &str) -> String {
    format!(
        "{name} on several GPUs by the label {GPU_COUNT}: set request.kubelet = \"refuse\" on the \
         node, so that its runtime knows whose they are"
    )
}

/// The amounts of a container's resources whose names `counts` chooses; none of 0.
fn amounts(container: &Container, counts: impl Fn(&str) -> bool) -> Amounts {
    let resources = container.resources.as_ref();
    let limits = resources.and_then(|resources| resources.limits.as_ref()).into_iter().flatten();
    let read = |(name, Quantity(text)): (&String, &Quantity)| {
        // What cannot be read is more than there is of anything.
        let count = counts(name).then(|| kubernetes_quantity(text).unwrap_or(u64::MAX))?;
        (count > 0).then(|| (name.clone(), count))
    };
    limits.filter_map(read).collect()
}

/// Thousandths of processors that a pod requests: those of containers that run together, or of one that ends
/// before them.
pub fn cpu(pod: &Pod) -> u64 {
    let of = |container: &Container| {
        let resources = container.resources.as_ref();
        let requests = resources.and_then(|resources| resources.requests.as_ref());
        requests.and_then(|requests| milli(&requests.get("cpu")?.0)).unwrap_or(0)
    };
    let Some(spec) = &pod.spec else { return 0 };
    let first = spec.init_containers.iter().flatten().map(of).max().unwrap_or(0);
    spec.containers.iter().map(of).fold(0_u64, u64::saturating_add).max(first)
}

/// Thousandths of a quantity.
pub fn milli(text: &str) -> Option<u64> {
    match text.strip_suffix('m') {
        Some(milli) => kubernetes_quantity(milli),
        // The quantity with a suffix that makes it a thousandth is the number of thousandths, rounded up.
        None => match text.split_once('.') {
            None => kubernetes_quantity(text)?.checked_mul(1000),
            Some((whole, part)) => {
                let thousandths: String = part.chars().chain("000".chars()).take(3).collect();
                let whole = if whole.is_empty() { 0 } else { kubernetes_quantity(whole)? };
                whole.checked_mul(1000)?.checked_add(thousandths.parse().ok()?)
            }
        },
    }
}

/// What a node makes of resources.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Terms {
    /// Those that it serves.
    pub resources: Vec<Resource>,
    /// Percent of compute of a container that names none; 0 is no limit.
    pub default_cores: u16,
    /// Whether it gives parts of several GPUs by [`GPU_COUNT`]: its runtime has to know by kubelet's list
    /// whose they are.
    pub gives_split: bool,
}

impl Terms {
    /// What amounts of these resources are where kubelet has given them.
    pub fn of_given(resources: &[Resource]) -> Self {
        Self { resources: resources.to_vec(), default_cores: 0, gives_split: true }
    }

    /// What the pod needs of such a node, and the names of its containers in the order of the shares.
    ///
    /// # Errors
    /// When such a node cannot serve it, in words for the pod's author.
    pub fn needs(&self, asking: &[Asking]) -> Result<(Needs, Vec<String>), String> {
        let (mut shares, mut first) = (Vec::new(), Vec::new());
        for one in asking {
            let share = self.share(&one.amounts, one.gpus).and_then(|share| {
                self.check_split(&one.amounts, one.gpus)?;
                Ok(share)
            });
            let share = share.map_err(|why| format!("container {}: {why}", one.container))?;
            let its = if one.ends_first { &mut first } else { &mut shares };
            its.push((share, one.container.clone()));
        }
        let names = shares.iter().chain(&first).map(|(_, name)| name.clone()).collect();
        let of = |list: Vec<(Share, String)>| list.into_iter().map(|(share, _)| share).collect();
        let needs = Needs { models: Models::ANY, shares: of(shares), first: of(first), ..Needs::default() };
        Ok((needs, names))
    }

    /// What the pod has where it is bound to such a node, and the names of its containers. A container whose
    /// amounts make no share counts as a whole GPU, and one of which the node serves nothing as none.
    pub fn held(&self, asking: &[Asking]) -> (Needs, Vec<String>) {
        let (mut shares, mut first) = (Vec::new(), Vec::new());
        let serves = |one: &&Asking| self.resources.iter().any(|known| one.amounts.contains_key(&known.name));
        for one in asking.iter().filter(serves) {
            let whole = Share { gpus: 1, part: Part::Whole };
            let share = self.share(&one.amounts, one.gpus).unwrap_or(whole);
            let its = if one.ends_first { &mut first } else { &mut shares };
            its.push((share, one.container.clone()));
        }
        let names = shares.iter().chain(&first).map(|(_, name)| name.clone()).collect();
        let of = |list: Vec<(Share, String)>| list.into_iter().map(|(share, _)| share).collect();
        (Needs { models: Models::ANY, shares: of(shares), first: of(first), ..Needs::default() }, names)
    }

    /// What one container needs that asks for these amounts, of `gpus` GPUs where they do not say how many.
    ///
    /// # Errors
    /// When no such node can serve it.
    pub fn share(&self, amounts: &Amounts, gpus: u8) -> Result<Share, String> {
        let mut said = Said::default();
        for (name, count) in amounts {
            let Some(resource) = self.resources.iter().find(|known| known.name == *name) else {
                return Err(format!("the node serves no {name}"));
            };
            said.read(resource, *count)?;
        }
        if !amounts.is_empty() && !self.has_devices(amounts) {
            let names: Vec<&str> = amounts.keys().map(String::as_str).collect();
            let slot = self.resources.iter().find(|known| matches!(known.unit, Unit::Slot(_)));
            let slot = slot.map_or("a resource that kubelet counts", |slot| &slot.name);
            return Err(format!(
                "kubelet gives no GPU for {} alone: ask for {slot}: 1, too",
                names.join(" and ")
            ));
        }
        let gpus = if self.alibabas(amounts).next().is_some() { gpus } else { 1 };
        said.share(self.default_cores, gpus)
    }

    /// The amounts that are of several GPUs together by a label: Alibaba's.
    fn alibabas(&self, amounts: &Amounts) -> impl Iterator<Item = (&Resource, u64)> {
        let its = self.resources.iter().filter(|known| known.system == System::Aliyun);
        its.filter_map(|known| Some((known, *amounts.get(&known.name)?)))
    }

    /// Refuses amounts of several GPUs together that the node does not give, or that are no whole number on
    /// each.
    fn check_split(&self, amounts: &Amounts, gpus: u8) -> Result<(), String> {
        let Some((first, _)) = self.alibabas(amounts).next().filter(|_| gpus > 1) else { return Ok(()) };
        if !self.gives_split {
            return Err(unsplit(&first.name));
        }
        match self.alibabas(amounts).find(|(_, count)| !count.is_multiple_of(gpus.into())) {
            None => Ok(()),
            Some((known, count)) => Err(format!(
                "{count} of {} are no whole number on each of {gpus} GPUs ({GPU_COUNT}): ask for a multiple",
                known.name
            )),
        }
    }

    /// Whether kubelet gives devices for one of these.
    fn has_devices(&self, amounts: &Amounts) -> bool {
        let mut its = self.resources.iter().filter(|known| amounts.contains_key(&known.name));
        its.any(|known| known.counted() == Counted::ByKubelet)
    }
}

/// What a container's resources say.
#[derive(Default)]
struct Said {
    /// The GPUs of which it is to have a share each.
    slots: Option<u8>,
    replica: Option<u16>,
    memory: Option<Memory>,
    compute: Option<Compute>,
}

impl Said {
    fn read(&mut self, resource: &Resource, count: u64) -> Result<(), String> {
        let name = &resource.name;
        match resource.unit {
            Unit::Slot(_) => {
                let gpus = u8::try_from(count).ok().filter(|count| usize::from(*count) <= GPUS);
                self.slots = Some(gpus.ok_or_else(|| {
                    format!("{count} of {name}: each is of another GPU, and a node has at most {GPUS}")
                })?);
            }
            Unit::Replica(parts) if count == 1 => self.replica = Some(parts),
            Unit::Replica(_) => {
                return Err(format!(
                    "{count} of {name}: several replicas are not one larger share: ask for 1"
                ));
            }
            // Who says both means the amount, as HAMi has it.
            Unit::Memory(each) => self.memory = Some(Memory::Bytes(bytes(name, count, each)?)),
            Unit::MemoryPercent if count > 100 => {
                return Err(format!("{count} of {name}: at most 100 percent of a GPU's memory"));
            }
            Unit::MemoryPercent => {
                let count = u16::try_from(count).unwrap_or(100);
                self.memory = self.memory.or(Some(Memory::Part { count, of: 100 }));
            }
            Unit::Percent => self.compute = Some(percent(resource, count)?),
            Unit::Gpus => {
                return Err(format!("{name} tells how many GPUs a node has; it is not to be asked for"));
            }
        }
        Ok(())
    }

    fn share(self, default_cores: u16, gpus: u8) -> Result<Share, String> {
        let all = Memory::Part { count: 100, of: 100 };
        let (gpus, cores) = match (self.slots, self.compute) {
            (_, Some(Compute { gpus, percent: None })) => return Ok(Share { gpus, part: Part::Whole }),
            (Some(slots), Some(Compute { percent: Some(percent), .. })) => (slots, percent),
            // A share of which nothing is said is the whole GPU, as HAMi has it.
            (Some(slots), None) if self.memory.is_none_or(|memory| memory == all) => (slots, 100),
            (Some(slots), None) => (slots, default_cores),
            (None, Some(Compute { gpus: several @ 2.., percent: Some(percent) })) => (several, percent),
            (None, Some(Compute { percent: Some(percent), .. })) => (gpus, percent / u16::from(gpus.max(1))),
            (None, None) => (gpus, default_cores),
        };
        let memory = match (self.slots, self.replica, self.memory) {
            (_, Some(of), _) => Memory::Part { count: 1, of },
            (Some(_), _, memory) => memory.unwrap_or(all),
            // Of several GPUs the amount is all of them together.
            (None, _, Some(Memory::Bytes(bytes))) => {
                Memory::Bytes((bytes / u64::from(gpus.max(1))) >> 20 << 20)
            }
            (None, _, memory) => memory.unwrap_or(Memory::Default),
        };
        if gpus > 1 && (memory == Memory::Bytes(0) || (cores == 0 && self.compute.is_some())) {
            return Err(format!("{gpus} GPUs get nothing each: ask for more, or for fewer GPUs"));
        }
        Ok(Share { gpus: gpus.max(1), part: Part::Of(memory, cores) })
    }
}

/// What a number of percent of compute is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compute {
    /// Of how many GPUs.
    pub gpus: u8,
    /// Percent of each; `None` is whole GPUs.
    pub percent: Option<u16>,
}

/// What so many percent of compute are.
///
/// # Errors
/// When the system of that name does not give so many.
pub fn percent(resource: &Resource, count: u64) -> Result<Compute, String> {
    let name = &resource.name;
    let most = 100 * GPUS as u64;
    match resource.system {
        _ if count == 0 || count > most => {
            return Err(format!("{count} of {name}: 1 to 100 are percent of one GPU"));
        }
        System::Qgpu if count < 100 && !count.is_multiple_of(5) => {
            return Err(format!("{count} of {name}: qGPU counts compute in steps of 5"));
        }
        // As many GPUs as it takes, and an equal part of each.
        System::Qgpu if count >= 100 && !count.is_multiple_of(100) => {
            let gpus = count.div_ceil(100);
            let (gpus, each) = (u8::try_from(gpus).unwrap_or(u8::MAX), u16::try_from(count / gpus).ok());
            return Ok(Compute { gpus, percent: each });
        }
        System::Qgpu | System::GpuManager | System::Elastic if count >= 100 => {
            let gpus = u8::try_from(count / 100).ok().filter(|_| count.is_multiple_of(100));
            let gpus = gpus.ok_or_else(|| {
                format!("{count} of {name}: 1 to 99 are percent of one GPU, and 100, 200 … whole GPUs; write one of these")
            })?;
            return Ok(Compute { gpus, percent: None });
        }
        _ => {}
    }
    match u16::try_from(count) {
        Ok(percent @ 1..=100) => Ok(Compute { gpus: 1, percent: Some(percent) }),
        _ => Err(format!("{count} of {name}: one container has at most 100 % of a GPU's compute")),
    }
}

/// The bytes of a number of units.
fn bytes(name: &str, count: u64, each: u64) -> Result<u64, String> {
    /// More memory than any GPU will have.
    const ABSURD: u64 = 1 << 42;
    let unit = Unit::Memory(each).name();
    match count.checked_mul(each).filter(|bytes| *bytes < ABSURD) {
        Some(bytes) => Ok(bytes),
        None => Err(format!(
            "{count} of {name}, of which one is {unit}: that is more than any GPU has; write the number of these units, \
             without a suffix as G or Gi"
        )),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::{Value, json};

    const GIB: u64 = 1 << 30;

    /// A resource.
    pub fn resource(name: &str, unit: Unit, system: System) -> Resource {
        Resource { name: name.to_owned(), unit, system }
    }

    fn terms(resources: &[Resource]) -> Terms {
        Terms::of_given(resources)
    }

    fn one(memory: Memory, cores: u16) -> Share {
        Share { gpus: 1, part: Part::Of(memory, cores) }
    }

    fn read(terms: &Terms, amounts: &[(&str, u64)]) -> Result<Share, String> {
        terms.share(&amounts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(), 1)
    }

    #[test]
    fn amounts_mean_what_their_systems_say() {
        let aliyun = terms(&[
            resource("aliyun.com/gpu-mem", Unit::Memory(GIB), System::Aliyun),
            resource("aliyun.com/gpu-core.percentage", Unit::Percent, System::Aliyun),
        ]);
        let vcuda = terms(&[
            resource("tencent.com/vcuda-core", Unit::Percent, System::GpuManager),
            resource("tencent.com/vcuda-memory", Unit::Memory(GIB / 4), System::GpuManager),
        ]);
        let hami = terms(&[
            resource("nvidia.com/gpu", Unit::Slot(10), System::Hami),
            resource("nvidia.com/gpumem", Unit::Memory(1 << 20), System::Hami),
            resource("nvidia.com/gpumem-percentage", Unit::MemoryPercent, System::Hami),
            resource("nvidia.com/gpucores", Unit::Percent, System::Hami),
        ]);
        let shared = terms(&[resource("nvidia.com/gpu.shared", Unit::Replica(3), System::Nvidia)]);
        let qgpu = terms(&[resource("tke.cloud.tencent.com/qgpu-core", Unit::Percent, System::Qgpu)]);
        for (terms, amounts, want) in [
            (&aliyun, &[("aliyun.com/gpu-mem", 8)][..], one(Memory::Bytes(8 * GIB), 0)),
            (
                &aliyun,
                &[("aliyun.com/gpu-mem", 8), ("aliyun.com/gpu-core.percentage", 100)],
                one(Memory::Bytes(8 * GIB), 100),
            ),
            (&aliyun, &[("aliyun.com/gpu-core.percentage", 20)], one(Memory::Default, 20)),
            (
                &vcuda,
                &[("tencent.com/vcuda-core", 30), ("tencent.com/vcuda-memory", 8)],
                one(Memory::Bytes(2 * GIB), 30),
            ),
            (&vcuda, &[("tencent.com/vcuda-core", 200)], Share { gpus: 2, part: Part::Whole }),
            (
                &vcuda,
                &[("tencent.com/vcuda-core", 100), ("tencent.com/vcuda-memory", 8)],
                Share { gpus: 1, part: Part::Whole },
            ),
            (&hami, &[("nvidia.com/gpu", 1)], one(Memory::Part { count: 100, of: 100 }, 100)),
            (
                &hami,
                &[("nvidia.com/gpu", 2), ("nvidia.com/gpumem", 3000), ("nvidia.com/gpucores", 30)],
                Share { gpus: 2, part: Part::Of(Memory::Bytes(3000 << 20), 30) },
            ),
            (
                &hami,
                &[("nvidia.com/gpu", 1), ("nvidia.com/gpumem-percentage", 50)],
                one(Memory::Part { count: 50, of: 100 }, 0),
            ),
            (
                &hami,
                &[("nvidia.com/gpumem", 100), ("nvidia.com/gpumem-percentage", 50), ("nvidia.com/gpu", 1)],
                one(Memory::Bytes(100 << 20), 0),
            ),
            (&shared, &[("nvidia.com/gpu.shared", 1)], one(Memory::Part { count: 1, of: 3 }, 0)),
            (&qgpu, &[("tke.cloud.tencent.com/qgpu-core", 45)], one(Memory::Default, 45)),
        ] {
            assert_eq!(read(terms, amounts), Ok(want), "{amounts:?}");
        }
        for (terms, amounts, want) in [
            (&aliyun, &[("aliyun.com/gpu-mem", 10_000_000_000)][..], "without a suffix"),
            (&aliyun, &[("aliyun.com/gpu-mem", u64::MAX)], "more than any GPU has"),
            (&aliyun, &[("aliyun.com/gpu-core.percentage", 101)], "at most 100 %"),
            (&aliyun, &[("tencent.com/vcuda-core", 30)], "the node serves no tencent.com/vcuda-core"),
            (&vcuda, &[("tencent.com/vcuda-core", 150)], "100, 200"),
            (&vcuda, &[("tencent.com/vcuda-core", 100_000)], "1 to 100"),
            (&hami, &[("nvidia.com/gpu", 17)], "at most 16"),
            (&hami, &[("nvidia.com/gpu", 1), ("nvidia.com/gpumem-percentage", 101)], "at most 100 percent"),
            (&shared, &[("nvidia.com/gpu.shared", 2)], "ask for 1"),
            (&qgpu, &[("tke.cloud.tencent.com/qgpu-core", 7)], "steps of 5"),
        ] {
            let told = read(terms, amounts).unwrap_err();
            assert!(told.contains(want), "{want}: {told}");
        }
    }

    #[test]
    fn amounts_of_several_gpus_are_even_and_of_nodes_that_know_whose_they_are() {
        let known = terms(&[resource("aliyun.com/gpu-mem", Unit::Memory(GIB), System::Aliyun)]);
        let asking = |count: u64, gpus| Asking {
            container: "main".into(),
            amounts: [("aliyun.com/gpu-mem".to_owned(), count)].into(),
            gpus,
            ends_first: false,
        };
        assert_eq!(known.needs(&[asking(8, 4)]).unwrap().0.shares[0].gpus, 4);
        let told = known.needs(&[asking(9, 4)]).unwrap_err();
        assert!(told.contains("no whole number on each of 4 GPUs"), "{told}");
        let unchecked = Terms { gives_split: false, ..known.clone() };
        let told = unchecked.needs(&[asking(8, 4)]).unwrap_err();
        assert!(told.contains("request.kubelet"), "{told}");
        assert!(unchecked.needs(&[asking(9, 1)]).is_ok());
        // What a bound pod says, by a label that it got since, is no reason to take it for a whole GPU.
        let held = unchecked.held(&[asking(9, 4)]).0.shares[0];
        assert_eq!(held, Share { gpus: 4, part: Part::Of(Memory::Bytes(9 * GIB / 4), 0) });
    }

    fn pod(spec: Value) -> Pod {
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap()
    }

    #[test]
    fn containers_that_end_first_and_sidecars_are_told_apart() {
        let asks = |count: u64| json!({"limits": {"aliyun.com/gpu-mem": count, "cpu": "2"}});
        let pod = pod(json!({
            "initContainers": [
                {"name": "first", "resources": asks(3)},
                {"name": "sidecar", "restartPolicy": "Always", "resources": asks(1)}],
            "containers": [{"name": "main", "resources": asks(2)}, {"name": "other"},
                {"name": "none", "resources": asks(0)}],
        }));
        let asking = asking(&pod);
        let told: Vec<_> = asking.iter().map(|one| (&*one.container, one.ends_first)).collect();
        assert_eq!(
            told,
            [("first", false), ("sidecar", false), ("main", false)],
            "the sidecar runs beside all"
        );
        let terms = terms(&[resource("aliyun.com/gpu-mem", Unit::Memory(GIB), System::Aliyun)]);
        let (needs, names) = terms.needs(&asking).unwrap();
        assert_eq!(names, ["first", "sidecar", "main"]);
        assert_eq!((needs.shares.len(), needs.first.len()), (3, 0));
        let mut alone = pod.clone();
        alone.spec.as_mut().unwrap().init_containers.as_mut().unwrap().truncate(1);
        let (needs, names) = terms.needs(&self::asking(&alone)).unwrap();
        assert_eq!((names, needs.first.len()), (vec!["main".to_owned(), "first".to_owned()], 1));
    }

    #[test]
    fn processors_are_counted_in_thousandths() {
        for (text, want) in [
            ("2", Some(2000)),
            ("500m", Some(500)),
            ("0.25", Some(250)),
            ("1.5", Some(1500)),
            ("x", None),
            (".5", Some(500)),
        ] {
            assert_eq!(milli(text), want, "{text}");
        }
        let asks = |cpu: &str| json!({"requests": {"cpu": cpu}});
        let pod = pod(json!({
            "initContainers": [{"name": "first", "resources": asks("3")}],
            "containers": [{"name": "one", "resources": asks("1500m")}, {"name": "other", "resources": asks("500m")}],
        }));
        assert_eq!(cpu(&pod), 3000);
    }
}
