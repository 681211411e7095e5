//! Makes a node: driver files, device nodes, `/proc` files, the state of the GPUs, and settings that point
//! gpushare to them.

use std::env;
use std::fs::{self, Permissions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail};
use gpushare_inventory::elf;
use gpushare_simulator::mig::Size;
use gpushare_simulator::physics::{H200_580, IDEAL, Physics};
use gpushare_simulator::session::pid_namespace;
use gpushare_simulator::state::{Gpu, State};
use gpushare_simulator::{clock, model};
use nix::errno::Errno;
use nix::mount::umount;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use crate::{Create, Device, Nvml, Pids, Profile, Rounding, driver_mount};

const UVM_MAJOR: u64 = 511;
const CAPS_MAJOR: u64 = 508;
/// Minors of MIG's nodes: 1 is for its configuration, 2 for monitoring, and from here on for instances.
const FIRST_CAPABILITY: u32 = 3;
/// Exported names, each with the CUDA version of the driver that first had it.
const CUDA_NAMES: &str = include_str!("../cuda/names.txt");
const NVML_NAMES: &str = include_str!("../nvml/names.txt");

/// Library directory of a driver root, as on Debian and Ubuntu.
const LIBRARIES: &str = if cfg!(target_arch = "aarch64") {
    "driver/usr/lib/aarch64-linux-gnu"
} else {
    "driver/usr/lib/x86_64-linux-gnu"
};

/// Entries of a node in its directory.
const ENTRIES: [&str; 5] = ["driver", "dev", "proc", "shared", "gpushare.toml"];

/// gpushare's own entries in a node's directory.
const OF_GPUSHARE: [&str; 3] = ["run", "history", "cache"];

/// Makes the node, and prints its GPUs and the path of its settings. On failure it leaves nothing behind.
pub fn create(create: &Create) -> Result<()> {
    let dir = std::path::absolute(&create.dir)?;
    // Check every entry, because cleaning up removes them all: below a directory such as / they would be the
    // machine's own.
    if ENTRIES.iter().any(|entry| dir.join(entry).symlink_metadata().is_ok()) {
        bail!("{} holds a node already; name another folder or remove this one", dir.display());
    }
    if dir.is_symlink() {
        bail!("{} is a link: name the folder behind it", dir.display());
    }
    let is_new = !dir.exists();
    if !is_new && !is_private(&dir)? {
        bail!(
            "{} is somebody else's folder, or others may write there: what they put into it would be run as the driver; name \
             another one",
            dir.display()
        );
    }
    make(&dir, create).inspect_err(|_| {
        let _ = driver_mount::detach(&dir);
        for path in ENTRIES.map(|entry| dir.join(entry)) {
            let _ = fs::remove_dir_all(&path).or_else(|_| fs::remove_file(&path));
        }
        if is_new {
            let _ = fs::remove_dir(&dir);
        }
    })
}

/// Whether only this user can change the directory's entries.
fn is_private(dir: &Path) -> Result<bool> {
    let folder = fs::metadata(dir).with_context(|| format!("cannot look at {}", dir.display()))?;
    let this_user = fs::metadata("/proc/self").context("cannot look at /proc/self")?.uid();
    Ok(folder.is_dir() && folder.uid() == this_user && folder.mode() & 0o022 == 0)
}

/// Removes the node, and gpushare's state of it in the paths of [`settings_text`]. Other files stay, and so
/// does the directory if it has any.
pub fn remove(dir: &Path) -> Result<()> {
    let dir = std::path::absolute(dir)?;
    if let Some(missing) = ENTRIES.iter().find(|entry| dir.join(entry).symlink_metadata().is_err()) {
        bail!("{} is no simulated node: it has no {missing}", dir.display());
    }
    if !is_private(&dir)? {
        bail!("{} is somebody else's folder, or others may write there: remove it by hand", dir.display());
    }
    refuse_held(&dir)?;
    // gpushare mounts them with the first share.
    for mounted in ["run/limits/namespace", "run/limits"].map(|path| dir.join(path)) {
        match umount(&mounted) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
            Err(error) => bail!("cannot unmount {}: {error}", mounted.display()),
        }
    }
    driver_mount::detach(&dir)?;
    for path in ENTRIES.iter().chain(&OF_GPUSHARE).map(|entry| dir.join(entry)) {
        let is_folder = path.symlink_metadata().is_ok_and(|entry| entry.is_dir());
        match if is_folder { fs::remove_dir_all(&path) } else { fs::remove_file(&path) } {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot remove {}", path.display()));
            }
            _ => {}
        }
    }
    match fs::remove_dir(&dir) {
        Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// Refuses while a container holds a share of the node. Uses the gpushare program next to this one: without
/// it there are no shares.
fn refuse_held(dir: &Path) -> Result<()> {
    let gpushare =
        env::current_exe().context("cannot tell where this program is")?.with_file_name("gpushare");
    // Only root gives shares.
    if !gpushare.is_file() || !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let mut ask = Command::new(&gpushare);
    let told = ask.args(["ps", "--quiet"]).env("GPUSHARE_CONFIG", dir.join("gpushare.toml")).output();
    let told = told.with_context(|| format!("cannot run {}", gpushare.display()))?;
    if !told.status.success() {
        bail!("cannot tell whether containers hold shares: {}", String::from_utf8_lossy(&told.stderr).trim());
    }
    if !told.stdout.is_empty() {
        bail!("{} has containers that hold a share (`gpushare ps`): end them first", dir.display());
    }
    Ok(())
}

fn make(dir: &Path, create: &Create) -> Result<()> {
    let settings = dir.join("gpushare.toml");
    let cuda = cuda_version(&create.driver)?;
    let libraries = Libraries::find()?;
    let [of_libraries, of_programs] = driver_folders(create);
    for folder in ["driver/usr/bin", of_libraries, of_programs, "dev", "proc/driver/nvidia/gpus", "shared"] {
        fs::create_dir_all(dir.join(folder)).with_context(|| format!("cannot make {folder}"))?;
    }
    fs::set_permissions(dir.join("shared"), Permissions::from_mode(0o777))?;
    let state = State::create(&dir.join("shared")).context("cannot make the state of the GPUs")?;
    fill(state, create, cuda)?;
    install(dir, create, &libraries, cuda).context("cannot install the driver files")?;
    if create.driver_mount && !create.plain_nodes {
        driver_mount::attach(dir)?;
    }
    device_nodes(dir, state.gpus(), create.plain_nodes)?;
    proc_files(&dir.join("proc"), state.gpus(), &create.driver).context("cannot write the /proc files")?;
    fs::write(&settings, settings_text(dir)).context("cannot write gpushare.toml")?;
    for gpu in state.gpus() {
        println!("{} {} {}", gpu.uuid_text(), gpu.address(), gpu.model.get());
    }
    println!("{}", settings.display());
    Ok(())
}

/// Returns the CUDA version of a driver, as cuDriverGetVersion reports it.
fn cuda_version(driver: &str) -> Result<u32> {
    let branch: u32 = driver
        .split('.')
        .next()
        .and_then(|text| text.parse().ok())
        .filter(|_| driver.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.'))
        .with_context(|| format!("{driver:?} is not a driver version; write for example 535.309.01"))?;
    let known = [
        (470, 11040),
        (495, 11050),
        (510, 11060),
        (515, 11070),
        (520, 11080),
        (525, 12000),
        (530, 12010),
        (535, 12020),
        (545, 12030),
        (550, 12040),
        (555, 12050),
        (560, 12060),
        (565, 12070),
        (570, 12080),
        (575, 12090),
        (580, 13000),
        (590, 13010),
        (595, 13020),
        (605, 13030),
        (615, 13040),
    ];
    let found = known.iter().rev().find(|(first, _)| *first <= branch);
    Ok(found.with_context(|| format!("driver {driver} is older than 470, the oldest that is simulated"))?.1)
}

struct Libraries {
    cuda: PathBuf,
    nvml: PathBuf,
}

impl Libraries {
    /// Finds the libraries next to this program, or in the directory where a package installs them.
    fn find() -> Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's folder")?;
        let own = program.parent().context("this program has no folder")?;
        let folders = [own.to_owned(), own.join("../lib/gpushare-simulator")];
        let find = |name: &str| {
            folders.iter().map(|folder| folder.join(name)).find(|path| path.exists()).with_context(|| {
                format!("{name} is neither in {} nor in {}", folders[0].display(), folders[1].display())
            })
        };
        Ok(Self {
            cuda: find("libgpushare_simulator_cuda.so")?,
            nvml: find("libgpushare_simulator_nvml.so")?,
        })
    }
}

fn fill(state: &State, create: &Create, cuda: u32) -> Result<()> {
    state.driver.set(&create.driver);
    state.cuda.store(cuda, Ordering::Relaxed);
    state.wall_offset.store(clock::wall().saturating_sub(clock::now()), Ordering::Relaxed);
    fill_sampling(state, create);
    let physics = physics(create);
    state.physics.set(&physics);
    for (gpu, index) in state.gpus.iter().zip(0..create.gpus) {
        let at = usize::try_from(index)?;
        match create.uuids.get(at) {
            Some(uuid) => set_uuid(gpu, uuid.bytes()),
            None => draw_uuid(gpu)?,
        }
        gpu.model.set(&create.model);
        gpu.bus.store(0x07 + 8 * index, Ordering::Relaxed);
        gpu.minor.store(create.minors.get(at).copied().unwrap_or(index), Ordering::Relaxed);
        gpu.cores.store(create.cores.unwrap_or(model::of(&create.model).cores), Ordering::Relaxed);
        gpu.memory.store(create.memory, Ordering::Relaxed);
        gpu.turns.slice.store(physics.slice, Ordering::Relaxed);
        gpu.turns.switch.store(physics.switch, Ordering::Relaxed);
        let linked = create.nvlink.iter().filter(|group| *group & (1 << index) != 0);
        let ends = linked.fold(0, |ends, group| ends | group) & !(1 << index);
        gpu.nvlinks.store(ends, Ordering::Relaxed);
    }
    let instances = divide(state, create)?;
    state.gpu_count.store(create.gpus + instances, Ordering::Release);
    Ok(())
}

/// A GPU in MIG mode, with the sizes of its instances.
#[derive(Clone, Debug)]
pub struct Divided {
    gpu: usize,
    sizes: Vec<Size>,
}

impl Divided {
    /// Parses `0=3g.40gb,1g.10gb`, or `0=` for a GPU without instances.
    pub fn parse(text: &str) -> Result<Self> {
        let (gpu, sizes) = text.split_once('=').context("write 0=3g.40gb,1g.10gb")?;
        let sizes = sizes
            .split(',')
            .filter(|size| !size.is_empty())
            .map(|size| Size::parse(size).with_context(|| format!("{size:?} is no size; write 1g.10gb")));
        Ok(Self {
            gpu: gpu.parse().context("write 0=3g.40gb,1g.10gb")?,
            sizes: sizes.collect::<Result<_>>()?,
        })
    }
}

/// Makes the instances after the GPUs, and returns their number. Ids and minors have gaps, like real ones.
fn divide(state: &State, create: &Create) -> Result<u32> {
    let (count, mut made) = (create.gpus, 0);
    for Divided { gpu: card, sizes } in &create.mig {
        let card_gpu = state.gpus.get(*card).filter(|_| *card < count as usize);
        let card_gpu = card_gpu.with_context(|| format!("the node has no GPU {card}"))?;
        let memory: u64 = sizes.iter().map(|size| size.memory).sum();
        let slices: u32 = sizes.iter().map(|size| size.slices).sum();
        if memory > create.memory || slices > 7 {
            bail!("GPU {card} has {} bytes and 7 slices, fewer than these instances together", create.memory);
        }
        card_gpu.mig_mode.store(1, Ordering::Relaxed);
        for (size, id) in sizes.iter().zip(1..) {
            let gpu = state.gpus.get((count + made) as usize).context("more than 16 GPUs and instances")?;
            gpu.part.card.store(u32::try_from(*card + 1)?, Ordering::Relaxed);
            gpu.part.gpu_instance.store(2 * id, Ordering::Relaxed);
            gpu.part.capability.store(FIRST_CAPABILITY + 3 * made, Ordering::Relaxed);
            gpu.part.slices.store(size.slices, Ordering::Relaxed);
            draw_uuid(gpu)?;
            gpu.model.set(&format!("{} MIG {}", create.model, size.name));
            gpu.bus.store(card_gpu.bus.load(Ordering::Relaxed), Ordering::Relaxed);
            gpu.minor.store(card_gpu.minor.load(Ordering::Relaxed), Ordering::Relaxed);
            let cores = card_gpu.cores.load(Ordering::Relaxed) * size.slices / 8;
            gpu.cores.store(cores.max(1), Ordering::Relaxed);
            gpu.memory.store(size.memory, Ordering::Relaxed);
            gpu.turns.slice.store(card_gpu.turns.slice.load(Ordering::Relaxed), Ordering::Relaxed);
            gpu.turns.switch.store(card_gpu.turns.switch.load(Ordering::Relaxed), Ordering::Relaxed);
            made += 1;
        }
    }
    Ok(made)
}

/// Returns the directory of an instance's GPU instance below the directory `proc`.
pub fn capability_folder(proc: &Path, gpu: &Gpu) -> PathBuf {
    let [minor, id] = [&gpu.minor, &gpu.part.gpu_instance].map(|number| number.load(Ordering::Relaxed));
    proc.join(format!("driver/nvidia/capabilities/gpu{minor}/mig/gi{id}"))
}

/// Writes the kernel module's MIG files: none on a node without MIG.
fn capability_files(proc: &Path, gpus: &[Gpu]) -> Result<()> {
    if gpus.iter().all(|gpu| gpu.mig_mode.load(Ordering::Relaxed) == 0) {
        return Ok(());
    }
    let mut minors = String::from("config 1\nmonitor 2\n");
    let write = |path: PathBuf, minor: u32, mode: u32| {
        fs::create_dir_all(path.parent().unwrap_or(proc))?;
        fs::write(path, format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"))
    };
    let of_all = proc.join("driver/nvidia/capabilities/mig");
    write(of_all.join("config"), 1, 0o400)?;
    write(of_all.join("monitor"), 2, 0o444)?;
    for gpu in gpus.iter().filter(|gpu| gpu.card().is_some()) {
        let (folder, [own, compute]) = (capability_folder(proc, gpu), gpu.capabilities());
        write(folder.join("access"), own, 0o444)?;
        write(folder.join("ci0/access"), compute, 0o444)?;
        let [card, id] = [&gpu.minor, &gpu.part.gpu_instance].map(|number| number.load(Ordering::Relaxed));
        minors.push_str(&format!("gpu{card}/gi{id}/access {own}\ngpu{card}/gi{id}/ci0/access {compute}\n"));
    }
    let folder = proc.join("driver/nvidia-caps");
    fs::create_dir_all(&folder)?;
    Ok(fs::write(folder.join("mig-minors"), minors)?)
}

/// Parses a list of GPUs into a set of bits.
pub fn linked(list: &str) -> Result<u64> {
    list.split(',').try_fold(0, |all, index| match index.trim().parse::<u32>() {
        Ok(index) if index < 16 => Ok(all | 1 << index),
        _ => bail!("{index:?} is not the index of a GPU, 0 to 15"),
    })
}

/// Draws a random UUID of version 4 for `gpu`.
pub fn draw_uuid(gpu: &Gpu) -> Result<()> {
    let mut uuid = [0_u8; 16];
    let mut random = fs::File::open("/dev/urandom").context("cannot draw a UUID")?;
    random.read_exact(&mut uuid).context("cannot draw a UUID")?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    set_uuid(gpu, uuid);
    Ok(())
}

fn set_uuid(gpu: &Gpu, uuid: [u8; 16]) {
    for (cell, byte) in gpu.uuid.iter().zip(uuid) {
        cell.store(byte, Ordering::Relaxed);
    }
}

/// Returns the physics from the profile and the single options.
fn physics(create: &Create) -> Physics {
    const MILLISECOND: u64 = clock::SECOND / 1000;
    /// Used if turns are requested and the profile has none.
    const SLICE: u64 = 2 * MILLISECOND;
    let profile = match create.profile {
        Profile::H200_580 => H200_580,
        Profile::Ideal => IDEAL,
    };
    let slice = create.slice.unwrap_or(if profile.slice > 0 { profile.slice } else { SLICE });
    let milliseconds = |count: u32| u64::from(count) * MILLISECOND;
    Physics {
        context: create.context.unwrap_or(profile.context),
        // A context of a given size does not grow.
        modules: if create.context.is_some() { [0; 2] } else { profile.modules },
        slice: match create.device {
            Some(Device::Fifo) => 0,
            Some(Device::Slices) => slice,
            None if profile.slice > 0 => slice,
            None => 0,
        },
        period: create.sample_period.map_or(profile.period, milliseconds),
        delay: create.sample_delay.map_or(profile.delay, |delay| [milliseconds(delay), 0]),
        ..profile
    }
}

fn fill_sampling(state: &State, create: &Create) {
    let sampling = &state.sampling;
    let nearest = create.sample_rounding == Rounding::Nearest;
    sampling.nearest.store(nearest.into(), Ordering::Relaxed);
    sampling.no_processes.store((create.nvml == Nvml::NoProcesses).into(), Ordering::Relaxed);
    sampling.host_pids.store((create.nvml_pids == Pids::Host).into(), Ordering::Relaxed);
    sampling.namespace.store(pid_namespace(), Ordering::Relaxed);
}

fn install(dir: &Path, create: &Create, libraries: &Libraries, cuda: u32) -> Result<()> {
    let [folder, programs] = driver_folders(create).map(|folder| dir.join(folder));
    let mut parts = vec![("libcuda.so", &libraries.cuda, CUDA_NAMES)];
    if create.nvml != Nvml::Absent {
        parts.push(("libnvidia-ml.so", &libraries.nvml, NVML_NAMES));
    }
    for (stem, library, names) in parts {
        let real = format!("{stem}.{}", create.driver);
        let mut library = fs::read(library)?;
        let newer = newer_names(names, cuda);
        elf::undefine(&mut library, |name| {
            newer.binary_search_by(|newer| newer.as_bytes().cmp(name)).is_ok()
        })?;
        fs::write(folder.join(&real), library)?;
        fs::set_permissions(folder.join(&real), Permissions::from_mode(0o755))?;
        symlink(&real, folder.join(format!("{stem}.1")))?;
        symlink(format!("{stem}.1"), folder.join(stem))?;
    }
    if let Some(program) = &create.nvidia_smi {
        let target = programs.join("nvidia-smi");
        fs::copy(program, &target).with_context(|| format!("cannot copy {}", program.display()))?;
        fs::set_permissions(&target, Permissions::from_mode(0o755))?;
    }
    if create.nvidia_smi_script {
        driver_mount::write_script(dir)?;
    }
    Ok(())
}

/// Returns the directories of the driver's libraries and programs.
fn driver_folders(create: &Create) -> [&'static str; 2] {
    match create.driver_mount {
        true => [driver_mount::LIBRARIES, driver_mount::PROGRAMS],
        false => [LIBRARIES, "driver/usr/bin"],
    }
}

/// Returns those of `names` that appeared after CUDA `cuda`, sorted.
fn newer_names(names: &'static str, cuda: u32) -> Vec<&'static str> {
    let mut names: Vec<&str> = names
        .lines()
        .filter_map(|line| {
            let mut words = line.split(' ');
            let name = words.next()?;
            let version: u32 = words.next()?.parse().ok()?;
            (version > cuda).then_some(name)
        })
        .collect();
    names.sort_unstable();
    names
}

fn device_nodes(dir: &Path, gpus: &[Gpu], plain: bool) -> Result<()> {
    let whole = gpus.iter().filter(|gpu| gpu.card().is_none());
    let minors = whole.map(|gpu| u64::from(gpu.minor.load(Ordering::Relaxed)));
    let mut nodes: Vec<(String, u64, u64, u32)> =
        minors.map(|minor| (format!("nvidia{minor}"), 195, minor, 0o666)).collect();
    nodes.push(("nvidiactl".into(), 195, 255, 0o666));
    nodes.push(("nvidia-uvm".into(), UVM_MAJOR, 0, 0o666));
    nodes.push(("nvidia-uvm-tools".into(), UVM_MAJOR, 1, 0o666));
    if gpus.iter().any(|gpu| gpu.mig_mode.load(Ordering::Relaxed) == 1) {
        fs::create_dir_all(dir.join("dev/nvidia-caps"))?;
        let parts = gpus.iter().filter(|gpu| gpu.card().is_some()).flat_map(Gpu::capabilities);
        let all = [(1, 0o400), (2, 0o444)].into_iter().chain(parts.map(|minor| (minor, 0o444)));
        nodes.extend(
            all.map(|(minor, mode)| {
                (format!("nvidia-caps/nvidia-cap{minor}"), CAPS_MAJOR, minor.into(), mode)
            }),
        );
    }
    for (name, major, minor, mode) in nodes {
        let path = dir.join("dev").join(&name);
        if plain {
            fs::write(&path, [])?;
        } else {
            let made = mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(mode), makedev(major, minor));
            made.with_context(|| format!("cannot make the device node {name} (only root can)"))?;
        }
        // mknod applies the umask.
        fs::set_permissions(&path, Permissions::from_mode(mode))?;
    }
    Ok(())
}

fn proc_files(proc: &Path, gpus: &[Gpu], driver: &str) -> Result<()> {
    let nvidia = proc.join("driver/nvidia");
    let version = format!(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Thu Jan  1 00:00:00 UTC 2026\n\
         GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    );
    fs::write(nvidia.join("version"), version)?;
    fs::write(nvidia.join("params"), PARAMS)?;
    for gpu in gpus.iter().filter(|gpu| gpu.card().is_none()) {
        write_information(proc, gpu)?;
    }
    capability_files(proc, gpus)?;
    let has_mig = gpus.iter().any(|gpu| gpu.mig_mode.load(Ordering::Relaxed) == 1);
    let caps = if has_mig { format!("{CAPS_MAJOR} nvidia-caps\n") } else { String::new() };
    let frontend = match driver.split('.').next().and_then(|branch| branch.parse::<u32>().ok()) {
        Some(branch) if branch >= 550 => "195 nvidia\n195 nvidiactl\n",
        _ => "195 nvidia-frontend\n",
    };
    let devices = format!(
        "Character devices:\n  1 mem\n  5 /dev/tty\n 10 misc\n136 pts\n{frontend}{UVM_MAJOR} nvidia-uvm\n{caps}\n\
         Block devices:\n  7 loop\n259 blkext\n"
    );
    fs::write(proc.join("devices"), devices)?;
    Ok(())
}

/// Writes the `information` file of `gpu` below the directory `proc`.
pub fn write_information(proc: &Path, gpu: &Gpu) -> Result<()> {
    let folder = proc.join("driver/nvidia/gpus").join(gpu.address());
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("information"), information(gpu)).context("cannot write the GPU's information")
}

const PARAMS: &str = "ResmanDebugLevel: 4294967295\nRmLogonRC: 1\nModifyDeviceFiles: 1\nDeviceFileUID: 0\n\
    DeviceFileGID: 0\nDeviceFileMode: 438\nInitializeSystemMemoryAllocations: 1\nUsePageAttributeTable: 4294967295\n\
    EnableMSI: 1\nEnablePCIeGen3: 0\nMemoryPoolSize: 0\nRegistryDwords: \"\"\nRegistryDwordsPerDevice: \"\"\n\
    RmMsg: \"\"\nGpuBlacklist: \"\"\nExcludedGpus: \"\"\n";

fn information(gpu: &Gpu) -> String {
    format!(
        "Model: \t\t {}\nIRQ:   \t\t 42\nGPU UUID: \t {}\nVideo BIOS: \t 96.00.61.00.01\nBus Type: \t PCIe\n\
         DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {}\n\
         GPU Excluded:\t {}\n",
        gpu.model.get(),
        gpu.uuid_text(),
        gpu.address(),
        gpu.minor.load(Ordering::Relaxed),
        if gpu.excluded.load(Ordering::Relaxed) == 0 { "No" } else { "Yes" },
    )
}

fn settings_text(dir: &Path) -> String {
    let path = |name: &str| format!("{:?}", dir.join(name).display().to_string());
    let root = format!("{:?}", dir.display().to_string());
    format!(
        "# A node with simulated GPUs.\n[node]\ndriver_root = {}\ndev_root = {root}\nproc_root = {root}\n\n\
         [paths]\nstate = {}\nhistory = {}\ncache = {}\n\
         # Simulated GPUs have no resource manager whose calls one could perform.\n\
         supervisor = {}\n\n[[inject.mounts]]\nsource = {}\ndestination = \"{}\"\nwritable = true\n",
        path("driver"),
        path("run"),
        path("history"),
        path("cache"),
        path("no-supervisor-holds-simulated-GPUs"),
        path("shared"),
        gpushare_simulator::place::CONTAINER,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_version_tells_its_cuda_version() {
        for (driver, want) in [
            ("470.256.02", Some(11040)),
            ("535.309.01", Some(12020)),
            ("550.54.15", Some(12040)),
            ("570.86.10", Some(12080)),
            ("580.65.06", Some(13000)),
            ("390.1", None),
            ("latest", None),
            ("535.1/../..", None),
        ] {
            assert_eq!(cuda_version(driver).ok(), want, "driver {driver}");
        }
    }

    #[test]
    fn an_old_driver_lacks_the_names_of_newer_ones() {
        for (names, cuda, name, lacks) in [
            (CUDA_NAMES, 11040, "cuGetProcAddress_v2", true),
            (CUDA_NAMES, 12020, "cuGetProcAddress_v2", false),
            (CUDA_NAMES, 11040, "cuMemAllocAsync", false),
            (NVML_NAMES, 11040, "nvmlDeviceGetMemoryInfo_v2", true),
            (NVML_NAMES, 12020, "nvmlDeviceGetMemoryInfo_v2", false),
            (NVML_NAMES, 12020, "nvmlDeviceGetProcessesUtilizationInfo", true),
            (NVML_NAMES, 12040, "nvmlDeviceGetProcessesUtilizationInfo", false),
            (NVML_NAMES, 13030, "nvmlDeviceSetMemoryLimits_v1", true),
        ] {
            assert_eq!(newer_names(names, cuda).contains(&name), lacks, "{name} at {cuda}");
        }
    }
}
