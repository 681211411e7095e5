use gpushare_inventory::{DriverFile, DriverLibrary, GpuUuid, LeftOut, SharedNodes};
use gpushare_quota::{Enforcement, Grant, Holder, LeaseKey, Member};
use gpushare_request::{Container, Cores, Devices, Interceptor, InterceptorPolicy, Policy, Priority, read};

use super::*;
use crate::driver_limit::DriverLimits;
use crate::host_files::KINDS;
use crate::image::CacheFile;
use crate::settings::ExtraMount;
use crate::supervision::SupervisorSettings;

fn node(name: &str, minor: u32, mode: u32, gid: u32) -> DeviceNode {
    let path = Path::new("/dev").join(name);
    DeviceNode { host_path: path.clone(), path, major: 195, minor, mode, uid: 0, gid }
}

#[test]
fn a_group_is_given_where_it_opens_a_node_and_never_roots() {
    let node = |mode, gid| node("nvidia0", 0, mode, gid);
    for (mode, gid, want) in [
        (0o666, 44, &[][..]),
        (0o660, 44, &[44]),
        (0o660, 0, &[]),
        (0o600, 44, &[]),
        (0o640, 44, &[]),
        (0o664, 44, &[44]),
    ] {
        assert_eq!(groups(&[&node(mode, gid)]), want, "mode {mode:o}, group {gid}");
    }
    assert_eq!(groups(&[&node(0o660, 44), &node(0o660, 7), &node(0o660, 44)]), [7, 44]);
}

/// The inputs of a plan, as values.
struct Parts {
    gpus: Vec<Gpu>,
    nodes: SharedNodes,
    files: HostFiles,
    image: Image,
    extra: Vec<ExtraMount>,
    /// The lease of another container, which this one joins.
    lease: Option<Lease>,
}

impl Parts {
    /// Two GPUs, and the files of a container that may compute and use NVML. With `is_intercepted` they
    /// include our libraries.
    fn new(is_intercepted: bool) -> Self {
        let gpu = |index: u8| Gpu {
            index: index.into(),
            uuid: GpuUuid::from_bytes([index; 16]),
            minor: index.into(),
            model: "NVIDIA H100".to_owned(),
            memory: None,
            node: node(&format!("nvidia{index}"), index.into(), 0o666, 0),
            place: gpushare_inventory::Place::default(),
            instance: None,
        };
        let nodes = SharedNodes {
            control: node("nvidiactl", 255, 0o666, 0),
            uvm: Some(node("nvidia-uvm", 0, 0o666, 0)),
            modeset: None,
            render: Vec::new(),
            capabilities_major: None,
        };
        let library = |kind: &'static crate::host_files::LibraryKind| crate::host_files::HostLibrary {
            kind,
            requested: true,
            driver: format!("/host/{}.so.535.1", kind.stem).into(),
            fitted: is_intercepted.then(|| format!("/cache/{}", kind.stem).into()),
        };
        let files = HostFiles {
            hook: "/opt/gpushare-hook".into(),
            libraries: KINDS.iter().map(library).collect(),
            ..HostFiles::default()
        };
        let image = Image { library_folder: "/usr/lib64".into(), ..Image::default() };
        Self { gpus: vec![gpu(0), gpu(1)], nodes, files, image, extra: Vec::new(), lease: None }
    }

    fn plan(&self, request: &Request) -> Result<Plan, PlanError> {
        let programs = Programs {
            hook: Path::new(""),
            libraries: Path::new(""),
            cache: Path::new("/cache"),
            state: Path::new("/state"),
            extra_mounts: &self.extra,
            left_out: LeftOut::default(),
            denies_user_namespaces: false,
            cli: Path::new("/bin/gpushare"),
            settings: None,
            supervisor: SupervisorSettings::off(),
            driver_limits: DriverLimits::Off,
            log: vec!["--log-level".to_owned(), "info".to_owned()],
        };
        let parts = PlanParts {
            driver_version: "580.142",
            gpus: &self.gpus,
            nodes: &self.nodes,
            files: &self.files,
            image: &self.image,
            programs: &programs,
            limiter: None,
            needs_poststop: true,
        };
        Plan::new(request, &self.lease.clone().unwrap_or_else(|| lease(request)), parts)
    }

    /// Each mount as `destination <- source`.
    fn mounts(&self, request: &Request) -> Vec<String> {
        let path = |path: &Option<PathBuf>| path.as_ref().unwrap().display().to_string();
        let plan = self.plan(request).unwrap();
        let told = |m: &Mount| format!("{} <- {}", m.destination().display(), path(m.source()));
        plan.mounts.iter().map(told).collect()
    }
}

/// A lease of the second GPU.
fn lease(request: &Request) -> Lease {
    let key = LeaseKey { root: "/run/runc".to_owned(), container: "web".to_owned() };
    let holder = Holder { pid: 1, start_time: 1, cgroup: None, leads: false };
    let grant = Grant {
        gpu: GpuUuid::from_bytes([1; 16]),
        card: None,
        memory: gpushare_inventory::DeviceMemory::ZERO,
        cores: None,
    };
    Lease {
        id: 7,
        member: Member::reserved(key, holder),
        others: Vec::new(),
        grants: vec![grant],
        enforcement: Enforcement::of(request),
        compute_policy: request.compute_policy,
        ceiling: Cores::ALL,
        host_memory: gpushare_inventory::DeviceMemory::ZERO,
        elastic: None,
        priority: Priority::default(),
        granted_at: 0,
        restated: std::collections::BTreeMap::new(),
        shrunk_from: Vec::new(),
    }
}

fn share() -> Request {
    let env = vec!["GPUSHARE_MEMORY=1GiB".to_owned()];
    read(&Container::new(Default::default(), env), &Policy::default(), &[]).unwrap().unwrap()
}

#[test]
fn a_share_has_our_libraries_over_the_drivers_names_and_its_region() {
    let parts = Parts::new(true);
    let limits = Region::of(Path::new("/state"), 7);
    let at = |path: PathBuf| path.display().to_string();
    let region = [
        format!("{} <- {}", c_path(inner::LIMITS).display(), at(limits.limits())),
        format!("{} <- {}", c_path(inner::USAGE).display(), at(limits.staged("web"))),
    ];
    let library = |kind: &crate::host_files::LibraryKind| {
        let stem = kind.stem;
        [
            format!("{} <- /host/{stem}.so.535.1", kind.private),
            format!("/usr/lib64/{stem}.so <- /cache/{stem}"),
            format!("/usr/lib64/{stem}.so.1 <- /cache/{stem}"),
        ]
    };
    let want: Vec<String> = KINDS.iter().flat_map(library).chain(region).collect();
    assert_eq!(parts.mounts(&share()), want);
    let plan = parts.plan(&share()).unwrap();
    assert!(plan.is_share());
    let devices: Vec<String> = plan.devices.iter().map(|d| d.path().display().to_string()).collect();
    assert_eq!(devices, ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
    assert_eq!(plan.device_rules.len(), 3);
    assert_eq!(plan.outside.other_nodes, [(195, 0)]);
    let arguments = plan.prestart.args().as_ref().unwrap().join(" ");
    assert_eq!(
        arguments,
        "gpushare-hook prestart --state /state --lease 7 --root /run/runc --id web --log-level info"
    );
}

#[test]
fn where_nothing_is_intercepted_the_drivers_libraries_have_their_own_names_and_no_limits_stand() {
    let theirs = Some((Interceptor::default(), InterceptorPolicy::StandDown));
    for request in [Request::whole(Devices::Any(1)), Request { interceptor: theirs, ..share() }] {
        let parts = Parts::new(false);
        let library = |kind: &crate::host_files::LibraryKind| {
            let stem = kind.stem;
            ["", ".1"].map(|end| format!("/usr/lib64/{stem}.so{end} <- /host/{stem}.so.535.1"))
        };
        let want: Vec<String> = KINDS.iter().flat_map(library).collect();
        assert_eq!(parts.mounts(&request), want, "{request:?}");
        assert!(!parts.plan(&request).unwrap().is_share());
    }
}

#[test]
fn a_copy_in_the_image_is_covered_by_our_library_even_where_its_capability_was_not_asked_for() {
    let mut parts = Parts::new(true);
    parts.image.driver_copies = vec!["/usr/local/cuda/compat/libcuda.so.550.1".into()];
    parts.files.libraries[0].requested = false;
    let mounts = parts.mounts(&share());
    let cuda: Vec<&String> = mounts.iter().filter(|mount| mount.contains("libcuda")).collect();
    let private = format!("{} <- /host/libcuda.so.535.1", KINDS[0].private);
    assert_eq!(cuda, [&private, "/usr/local/cuda/compat/libcuda.so.550.1 <- /cache/libcuda"]);
}

#[test]
fn the_drivers_further_files_and_the_administrators_mounts_follow() {
    let mut parts = Parts::new(true);
    parts.files.companions = vec![DriverLibrary {
        names: vec!["libnvidia-ptxjitcompiler.so.1".to_owned()],
        host_path: "/host/libnvidia-ptxjitcompiler.so.535.1".into(),
    }];
    parts.files.driver_files = vec![DriverFile {
        container_path: "/usr/bin/nvidia-smi".into(),
        host_path: "/host/nvidia-smi".into(),
        interpreter: Some("/lib64/ld-linux-x86-64.so.2".into()),
    }];
    let extra = |name: &str| ExtraMount {
        source: format!("/srv/{name}").into(),
        destination: format!("/data/{name}").into(),
        writable: false,
    };
    parts.files.extra_mounts = vec![(extra("models"), true), (extra("license"), false)];
    assert_eq!(
        parts.mounts(&share())[8..],
        [
            "/usr/lib64/libnvidia-ptxjitcompiler.so.1 <- /host/libnvidia-ptxjitcompiler.so.535.1",
            "/usr/bin/nvidia-smi <- /host/nvidia-smi",
            "/data/models <- /srv/models",
            "/data/license <- /srv/license",
        ]
    );
    let plan = parts.plan(&share()).unwrap();
    assert_eq!(plan.interpreters, [("/usr/bin/nvidia-smi".into(), "/lib64/ld-linux-x86-64.so.2".into())]);
    let folders: Vec<&Path> =
        plan.targets().filter(|(_, is_folder)| *is_folder).map(|(path, _)| path).collect();
    assert_eq!(folders, [Path::new("/data/models")]);
}

#[test]
fn what_a_plan_cannot_give_is_refused_by_name() {
    let without_uvm =
        Parts { nodes: SharedNodes { uvm: None, ..Parts::new(true).nodes }, ..Parts::new(true) };
    assert!(matches!(without_uvm.plan(&share()), Err(PlanError::NoUvm)));
    let mut gone = Parts::new(true);
    gone.gpus.pop();
    assert!(matches!(gone.plan(&share()), Err(PlanError::GpuGone(_))));
    let volume = |is_intercepted| {
        let mut parts = Parts::new(is_intercepted);
        parts.image.driver_volume = Some("/usr/lib64".into());
        parts
    };
    let refused = volume(true).plan(&share()).unwrap_err().to_string();
    assert!(refused.contains("/usr/lib64") && refused.contains("GPUSHARE_MODE=exclusive"), "{refused}");
    assert!(volume(false).plan(&Request::whole(Devices::Any(1))).is_ok());
}

#[test]
fn a_container_that_joins_a_lease_gets_no_more_of_the_gpu_than_the_lease_gives() {
    let whole = Request::whole(Devices::Any(1));
    let joined = |request: &Request, is_intercepted| Parts {
        lease: Some(lease(request)),
        ..Parts::new(is_intercepted)
    };
    let plan = joined(&share(), true).plan(&whole).unwrap();
    assert!(plan.is_share(), "the whole driver beside others' shares");
    let plan = joined(&whole, false).plan(&share()).unwrap();
    assert!(!plan.is_share(), "a whole GPU has no region");
}

#[test]
fn programs_are_told_the_grant_in_the_words_of_the_system_that_is_named() {
    use gpushare_request::{Request, Told};
    let gpu = |number: u8| Gpu {
        index: number.into(),
        uuid: GpuUuid::from_bytes([number; 16]),
        minor: 7,
        model: "NVIDIA H100".to_owned(),
        memory: Some(gpushare_inventory::DeviceMemory::from_bytes(80 << 30)),
        node: node("nvidia7", 7, 0o666, 0),
        place: gpushare_inventory::Place::default(),
        instance: None,
    };
    let gpus = [gpu(1), gpu(2)];
    let told = |told: Option<Told>| {
        let request = Request { told, ..share() };
        let mut lease = lease(&request);
        let memory = |gib: u64| gpushare_inventory::DeviceMemory::from_bytes(gib << 30);
        lease.grants = [1, 2]
            .map(|number| Grant {
                gpu: GpuUuid::from_bytes([number; 16]),
                card: None,
                memory: memory(3),
                cores: Cores::new(30),
            })
            .to_vec();
        let told = told::variables(&request, &lease, &gpus);
        told.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
    };
    assert!(told(None).is_empty());
    assert_eq!(
        told(Some(Told::Aliyun { unit: 1 << 30 })),
        [
            "ALIYUN_COM_GPU_MEM_IDX=1",
            "ALIYUN_COM_GPU_MEM_POD=3",
            "ALIYUN_COM_GPU_MEM_CONTAINER=3",
            "ALIYUN_COM_GPU_MEM_DEV=80"
        ]
    );
    assert_eq!(
        told(Some(Told::Hami)),
        ["CUDA_DEVICE_MEMORY_LIMIT_0=3072m", "CUDA_DEVICE_MEMORY_LIMIT_1=3072m", "CUDA_DEVICE_SM_LIMIT=30"]
    );
}

#[test]
fn the_loaders_cache_is_replaced_in_a_layer_of_the_engines_and_mounted_over_elsewhere() {
    let request = share();
    let mut node = Parts::new(true);
    let target = "/etc/ld.so.cache <- /state/regions/7.caches/web".to_owned();
    for (is_replaceable, is_mounted) in [(true, false), (false, true)] {
        let bytes = Ok(crate::loader_cache::tests::plain());
        node.image.loader_cache = Some(CacheFile { bytes, is_replaceable });
        let change = node.plan(&request).unwrap().loader_cache;
        assert_eq!(node.mounts(&request).contains(&target), is_mounted);
        let bytes = match change {
            CacheChange::Replace(bytes) if !is_mounted => bytes,
            CacheChange::Mount { bytes, .. } if is_mounted => bytes,
            other => panic!("{other:?}"),
        };
        let lists = |path: &str| bytes.windows(path.len()).any(|window| window == path.as_bytes());
        assert!(lists("/usr/lib64/libcuda.so.1") && lists("/usr/lib64/libnvidia-ml.so.1"));
        // A second start finds the cache as the first one left it.
        node.image.loader_cache = Some(CacheFile { bytes: Ok(bytes), is_replaceable });
        assert_eq!(node.plan(&request).unwrap().loader_cache, CacheChange::None);
        assert!(!node.mounts(&request).contains(&target));
    }
}
