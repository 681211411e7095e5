//! Copies and memsets. They really move the bytes, after checking that the process has the memory.

use crate::abi::{Code, DevicePointer, Handle, In, Out, Result};
use crate::driver::{Driver, driver};
use crate::work::Work;

/// One side of a copy: a first address, and the steps from row to row and plane to plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Address of the first byte.
    pub start: u64,
    /// Bytes from row to row.
    pub pitch: u64,
    /// Bytes from plane to plane.
    pub plane: u64,
    /// Whether the memory must be known to the driver: a device allocation or page-locked host memory.
    pub device: bool,
}

/// A copy of up to three dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Destination of the copy.
    pub to: Side,
    /// Source of the copy.
    pub from: Side,
    /// Bytes of a row, number of rows, number of planes.
    pub size: [u64; 3],
}

impl Side {
    fn flat(start: u64, device: bool) -> Self {
        Self { start, pitch: 0, plane: 0, device }
    }

    /// Bytes from the first to the last byte that `size` covers.
    fn span(&self, [width, rows, planes]: [u64; 3]) -> Result<u64> {
        let rows_before = rows.saturating_sub(1).checked_mul(self.pitch).ok_or(Code::INVALID_VALUE)?;
        let planes_before = planes.saturating_sub(1).checked_mul(self.plane).ok_or(Code::INVALID_VALUE)?;
        width
            .checked_add(rows_before)
            .and_then(|sum| sum.checked_add(planes_before))
            .ok_or(Code::INVALID_VALUE)
    }

    fn check(&self, driver: &Driver, size: [u64; 3]) -> Result {
        let span = self.span(size)?;
        let checked = driver.check(self.start, span);
        if self.device || self.start == 0 { checked } else { Ok(()) }
    }
}

impl Shape {
    fn flat(to: Side, from: Side, length: usize) -> Self {
        Self { to, from, size: [length as u64, 1, 1] }
    }

    fn check(&self, driver: &Driver) -> Result {
        if self.size.contains(&0) {
            return Ok(());
        }
        self.to.check(driver, self.size)?;
        self.from.check(driver, self.size)
    }

    /// Checks both sides and copies at once.
    pub fn perform(&self, driver: &Driver) -> Result {
        self.check(driver)?;
        let [width, rows, planes] = self.size;
        for plane in 0..planes {
            for row in 0..rows {
                let to = self.to.start + plane * self.to.plane + row * self.to.pitch;
                let from = self.from.start + plane * self.from.plane + row * self.from.pitch;
                move_bytes(to, from, width)?;
            }
        }
        Ok(())
    }
}

/// Writes `bytes` into newly allocated device memory.
pub fn write_bytes(start: u64, bytes: &[u8]) -> Result {
    move_bytes(start, bytes.as_ptr().expose_provenance() as u64, bytes.len() as u64)
}

fn move_bytes(to: u64, from: u64, length: u64) -> Result {
    let place = |address: u64| usize::try_from(address).map_err(|_| Code::INVALID_VALUE);
    let (target, source, length) = (place(to)?, place(from)?, place(length)?);
    let target: *mut u8 = std::ptr::with_exposed_provenance_mut(target);
    let source: *const u8 = std::ptr::with_exposed_provenance(source);
    // SAFETY: device ranges were looked up; for host ranges the caller guarantees that many bytes.
    unsafe { std::ptr::copy(source, target, length) };
    Ok(())
}

/// A memset of up to two dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// Address of the first byte.
    pub start: u64,
    /// Bytes from row to row.
    pub pitch: u64,
    /// The value, in the low bytes of the word.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u64,
    /// Elements in a row.
    pub width: u64,
    /// Number of rows.
    pub rows: u64,
}

impl Fill {
    fn row_bytes(&self) -> Result<u64> {
        self.width.checked_mul(self.element).ok_or(Code::INVALID_VALUE)
    }

    /// Refuses a range outside memory that the driver knows, and a start that is not aligned to the element.
    pub fn check(&self, driver: &Driver) -> Result {
        if !matches!(self.element, 1 | 2 | 4) || !self.start.is_multiple_of(self.element) {
            return Err(Code::INVALID_VALUE);
        }
        let side = Side { start: self.start, pitch: self.pitch, plane: 0, device: true };
        let size = [self.row_bytes()?, self.rows, 1];
        if size.contains(&0) { Ok(()) } else { side.check(driver, size) }
    }

    /// Checks the range and writes the value at once.
    pub fn perform(&self, driver: &Driver) -> Result {
        self.check(driver)?;
        let width = usize::try_from(self.row_bytes()?).map_err(|_| Code::INVALID_VALUE)?;
        for row in 0..self.rows {
            self.fill_row(self.start + row * self.pitch, width)?;
        }
        Ok(())
    }

    fn fill_row(&self, start: u64, width: usize) -> Result {
        let address = usize::try_from(start).map_err(|_| Code::INVALID_VALUE)?;
        let target: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
        // SAFETY: the range was looked up. It is device memory of this process, to which Rust has no
        // references.
        let bytes = unsafe { std::slice::from_raw_parts_mut(target, width) };
        let value = self.value.to_le_bytes();
        let element = usize::try_from(self.element).map_err(|_| Code::INVALID_VALUE)?;
        if element == 1 {
            bytes.fill(value[0]);
        } else {
            bytes.chunks_exact_mut(element).for_each(|chunk| chunk.copy_from_slice(&value[..element]));
        }
        Ok(())
    }
}

/// CUDA_MEMCPY2D of the driver's interface.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy2d {
    from_x: usize,
    from_y: usize,
    from_kind: u32,
    from_host: u64,
    from_device: u64,
    from_array: Handle,
    from_pitch: usize,
    to_x: usize,
    to_y: usize,
    to_kind: u32,
    to_host: u64,
    to_device: u64,
    to_array: Handle,
    to_pitch: usize,
    width: usize,
    rows: usize,
}

/// One side of CUDA_MEMCPY3D.
#[repr(C)]
#[derive(Clone, Copy)]
struct Side3d {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: u32,
    host: u64,
    device: u64,
    array: Handle,
    context: Handle,
    pitch: usize,
    rows: usize,
}

/// CUDA_MEMCPY3D, and CUDA_MEMCPY3D_PEER, which has contexts in place of the reserved fields.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Copy3d {
    from: Side3d,
    to: Side3d,
    width: usize,
    rows: usize,
    planes: usize,
}

impl Side3d {
    fn side(&self, driver: &Driver, width: usize) -> Result<Side> {
        let (start, pitch, rows, device) = match self.kind {
            1 => (self.host, self.pitch, self.rows, false),
            2 => (self.device, self.pitch, self.rows, true),
            3 => {
                let array = driver.arrays.get(self.array)?;
                (array.start, array.row_bytes(), array.rows(), true)
            }
            4 => (self.device, self.pitch, self.rows, false),
            _ => return Err(Code::INVALID_VALUE),
        };
        let pitch = (if pitch == 0 { width } else { pitch }) as u64;
        let plane = pitch.checked_mul(rows.max(1) as u64).ok_or(Code::INVALID_VALUE)?;
        let before = [(self.x as u64, 1), (self.y as u64, pitch), (self.z as u64, plane)];
        let offset = before.into_iter().try_fold(0_u64, |sum, (count, step)| {
            count.checked_mul(step).and_then(|bytes| sum.checked_add(bytes))
        });
        let start = offset.and_then(|offset| start.checked_add(offset)).ok_or(Code::INVALID_VALUE)?;
        Ok(Side { start, pitch, plane, device })
    }
}

impl Copy3d {
    /// The copy in terms of addresses.
    pub fn shape(&self, driver: &Driver) -> Result<Shape> {
        Ok(Shape {
            to: self.to.side(driver, self.width)?,
            from: self.from.side(driver, self.width)?,
            size: [self.width as u64, self.rows as u64, self.planes as u64],
        })
    }
}

impl Copy2d {
    fn shape(&self, driver: &Driver) -> Result<Shape> {
        let side = |x, y, kind, host, device, array, pitch| Side3d {
            x,
            y,
            z: 0,
            level: 0,
            kind,
            host,
            device,
            array,
            context: 0,
            pitch,
            rows: self.rows,
        };
        Copy3d {
            from: side(
                self.from_x,
                self.from_y,
                self.from_kind,
                self.from_host,
                self.from_device,
                self.from_array,
                self.from_pitch,
            ),
            to: side(
                self.to_x,
                self.to_y,
                self.to_kind,
                self.to_host,
                self.to_device,
                self.to_array,
                self.to_pitch,
            ),
            width: self.width,
            rows: self.rows,
            planes: 1,
        }
        .shape(driver)
    }
}

const DEVICE: bool = true;
const HOST: bool = false;

/// Copies in `stream`. Without a stream the copy is synchronous: a copy in the default stream that has ended
/// on return.
fn copy(stream: Option<Handle>, to: (u64, bool), from: (u64, bool), length: usize) -> Result {
    run(stream, Shape::flat(Side::flat(to.0, to.1), Side::flat(from.0, from.1), length))
}

fn run(stream: Option<Handle>, shape: Shape) -> Result {
    let driver = driver()?;
    shape.check(driver)?;
    driver.stream(stream.unwrap_or(0))?.enqueue(driver, Work::Copy(shape))
}

fn fill(stream: Option<Handle>, fill: Fill) -> Result {
    let driver = driver()?;
    fill.check(driver)?;
    driver.stream(stream.unwrap_or(0))?.enqueue(driver, Work::Fill(fill))
}

fn row(start: u64, value: u32, element: u64, count: usize) -> Fill {
    Fill { start, pitch: 0, value, element, width: count as u64, rows: 1 }
}

fn rect(start: u64, pitch: usize, value: u32, element: u64, width: usize, rows: usize) -> Fill {
    Fill { start, pitch: pitch as u64, value, element, width: width as u64, rows: rows as u64 }
}

fn array_start(array: Handle, offset: usize) -> Result<(u64, bool)> {
    Ok((driver()?.arrays.get(array)?.start + offset as u64, DEVICE))
}

exports! {
    fn cuMemcpy thread cuMemcpy_ptds (to: u64, from: u64, length: usize) {
        copy(None, (to, HOST), (from, HOST), length)
    }
    fn cuMemcpyAsync thread cuMemcpyAsync_ptsz (to: u64, from: u64, length: usize, stream: Handle) {
        copy(Some(stream), (to, HOST), (from, HOST), length)
    }
    fn cuMemcpyHtoD_v2 thread cuMemcpyHtoD_v2_ptds (to: DevicePointer, from: u64, length: usize) {
        copy(None, (to, DEVICE), (from, HOST), length)
    }
    fn cuMemcpyHtoDAsync_v2 thread cuMemcpyHtoDAsync_v2_ptsz
    (to: DevicePointer, from: u64, length: usize, stream: Handle) {
        copy(Some(stream), (to, DEVICE), (from, HOST), length)
    }
    fn cuMemcpyDtoH_v2 thread cuMemcpyDtoH_v2_ptds (to: u64, from: DevicePointer, length: usize) {
        copy(None, (to, HOST), (from, DEVICE), length)
    }
    fn cuMemcpyDtoHAsync_v2 thread cuMemcpyDtoHAsync_v2_ptsz
    (to: u64, from: DevicePointer, length: usize, stream: Handle) {
        copy(Some(stream), (to, HOST), (from, DEVICE), length)
    }
    fn cuMemcpyDtoD_v2 thread cuMemcpyDtoD_v2_ptds (to: DevicePointer, from: DevicePointer, length: usize) {
        copy(None, (to, DEVICE), (from, DEVICE), length)
    }
    fn cuMemcpyDtoDAsync_v2 thread cuMemcpyDtoDAsync_v2_ptsz
    (to: DevicePointer, from: DevicePointer, length: usize, stream: Handle) {
        copy(Some(stream), (to, DEVICE), (from, DEVICE), length)
    }
    fn cuMemcpyPeer thread cuMemcpyPeer_ptds
    (to: DevicePointer, _to_context: Handle, from: DevicePointer, _from_context: Handle, length: usize) {
        copy(None, (to, DEVICE), (from, DEVICE), length)
    }
    fn cuMemcpyPeerAsync thread cuMemcpyPeerAsync_ptsz (
        to: DevicePointer, _to_context: Handle, from: DevicePointer, _from_context: Handle, length: usize,
        stream: Handle,
    ) {
        copy(Some(stream), (to, DEVICE), (from, DEVICE), length)
    }
    fn cuMemcpyHtoA_v2 thread cuMemcpyHtoA_v2_ptds (array: Handle, offset: usize, from: u64, length: usize) {
        copy(None, array_start(array, offset)?, (from, HOST), length)
    }
    fn cuMemcpyAtoH_v2 thread cuMemcpyAtoH_v2_ptds (to: u64, array: Handle, offset: usize, length: usize) {
        copy(None, (to, HOST), array_start(array, offset)?, length)
    }
    fn cuMemcpyDtoA_v2 thread cuMemcpyDtoA_v2_ptds (array: Handle, offset: usize, from: u64, length: usize) {
        copy(None, array_start(array, offset)?, (from, DEVICE), length)
    }
    fn cuMemcpyAtoD_v2 thread cuMemcpyAtoD_v2_ptds (to: u64, array: Handle, offset: usize, length: usize) {
        copy(None, (to, DEVICE), array_start(array, offset)?, length)
    }
    fn cuMemcpy2D_v2 also cuMemcpy2DUnaligned_v2 thread cuMemcpy2D_v2_ptds thread cuMemcpy2DUnaligned_v2_ptds
    (copy: In<Copy2d>) {
        run(None, copy.get()?.shape(driver()?)?)
    }
    fn cuMemcpy2DAsync_v2 thread cuMemcpy2DAsync_v2_ptsz (copy: In<Copy2d>, stream: Handle) {
        run(Some(stream), copy.get()?.shape(driver()?)?)
    }
    fn cuMemcpy3D_v2 also cuMemcpy3DPeer thread cuMemcpy3D_v2_ptds thread cuMemcpy3DPeer_ptds (copy: In<Copy3d>) {
        run(None, copy.get()?.shape(driver()?)?)
    }
    fn cuMemcpy3DAsync_v2 also cuMemcpy3DPeerAsync thread cuMemcpy3DAsync_v2_ptsz
    thread cuMemcpy3DPeerAsync_ptsz (copy: In<Copy3d>, stream: Handle) {
        run(Some(stream), copy.get()?.shape(driver()?)?)
    }
    fn cuMemcpyBatchAsync_v2 thread cuMemcpyBatchAsync_v2_ptsz (
        to: In<u64>, from: In<u64>, lengths: In<usize>, count: usize, _attributes: In<u8>, _indexes: In<usize>,
        _attribute_count: usize, stream: Handle,
    ) {
        (0..count).try_for_each(|index| {
            copy(Some(stream), (to.at(index)?, HOST), (from.at(index)?, HOST), lengths.at(index)?)
        })
    }
    /// The first form also reports the index of the copy that failed.
    fn cuMemcpyBatchAsync thread cuMemcpyBatchAsync_ptsz (
        to: In<u64>, from: In<u64>, lengths: In<usize>, count: usize, _attributes: In<u8>, _indexes: In<usize>,
        _attribute_count: usize, failed: Out<usize>, stream: Handle,
    ) {
        (0..count).try_for_each(|index| {
            let copied = copy(Some(stream), (to.at(index)?, HOST), (from.at(index)?, HOST), lengths.at(index)?);
            copied.inspect_err(|_| failed.set_if_given(index))
        })
    }

    fn cuMemsetD8_v2 thread cuMemsetD8_v2_ptds (start: DevicePointer, value: u8, count: usize) {
        fill(None, row(start, u32::from(value), 1, count))
    }
    fn cuMemsetD16_v2 thread cuMemsetD16_v2_ptds (start: DevicePointer, value: u16, count: usize) {
        fill(None, row(start, u32::from(value), 2, count))
    }
    fn cuMemsetD32_v2 thread cuMemsetD32_v2_ptds (start: DevicePointer, value: u32, count: usize) {
        fill(None, row(start, value, 4, count))
    }
    fn cuMemsetD8Async thread cuMemsetD8Async_ptsz (start: DevicePointer, value: u8, count: usize, stream: Handle) {
        fill(Some(stream), row(start, u32::from(value), 1, count))
    }
    fn cuMemsetD16Async thread cuMemsetD16Async_ptsz
    (start: DevicePointer, value: u16, count: usize, stream: Handle) {
        fill(Some(stream), row(start, u32::from(value), 2, count))
    }
    fn cuMemsetD32Async thread cuMemsetD32Async_ptsz
    (start: DevicePointer, value: u32, count: usize, stream: Handle) {
        fill(Some(stream), row(start, value, 4, count))
    }
    fn cuMemsetD2D8_v2 thread cuMemsetD2D8_v2_ptds
    (start: DevicePointer, pitch: usize, value: u8, width: usize, rows: usize) {
        fill(None, rect(start, pitch, u32::from(value), 1, width, rows))
    }
    fn cuMemsetD2D16_v2 thread cuMemsetD2D16_v2_ptds
    (start: DevicePointer, pitch: usize, value: u16, width: usize, rows: usize) {
        fill(None, rect(start, pitch, u32::from(value), 2, width, rows))
    }
    fn cuMemsetD2D32_v2 thread cuMemsetD2D32_v2_ptds
    (start: DevicePointer, pitch: usize, value: u32, width: usize, rows: usize) {
        fill(None, rect(start, pitch, value, 4, width, rows))
    }
    fn cuMemsetD2D8Async thread cuMemsetD2D8Async_ptsz
    (start: DevicePointer, pitch: usize, value: u8, width: usize, rows: usize, stream: Handle) {
        fill(Some(stream), rect(start, pitch, u32::from(value), 1, width, rows))
    }
    fn cuMemsetD2D16Async thread cuMemsetD2D16Async_ptsz
    (start: DevicePointer, pitch: usize, value: u16, width: usize, rows: usize, stream: Handle) {
        fill(Some(stream), rect(start, pitch, u32::from(value), 2, width, rows))
    }
    fn cuMemsetD2D32Async thread cuMemsetD2D32Async_ptsz
    (start: DevicePointer, pitch: usize, value: u32, width: usize, rows: usize, stream: Handle) {
        fill(Some(stream), rect(start, pitch, value, 4, width, rows))
    }
}
