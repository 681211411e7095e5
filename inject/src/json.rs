//! A strict reader of config.json: a file that runtimes would read in different ways is refused.
//!
//! Go finds a field by its name without regard to case, and of two the last one counts. crun finds it by the
//! exact name, and of two the first one counts. For crun a text ends at its first NUL. A field or text that
//! runtimes read differently would escape every check here.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// The name under which `serde_json` gives a number with its text, if it is no 64-bit integer.
const NUMBER: &str = "$serde_json::private::Number";

/// What a place of config.json may hold.
#[derive(Debug)]
enum Shape {
    /// Anything that no decision depends on.
    Other,
    /// Names and texts that are the container's own: programs compare them exactly, and requests are read
    /// from them whole.
    Own,
    /// An object with these fields of the runtime specification, or a list of such.
    Fields(&'static [(&'static str, Shape)]),
}

use Shape::{Fields, Other, Own};

/// All fields that Go's runtimes look for at the levels where gpushare reads or writes something: version 1.2
/// of the specification, without those of systems other than Linux.
const CONFIG: Shape = Fields(&[
    ("annotations", Own),
    ("domainname", Other),
    ("hooks", Fields(HOOKS)),
    ("hostname", Other),
    ("linux", Fields(LINUX)),
    ("mounts", Fields(MOUNT)),
    ("ociVersion", Other),
    ("process", Fields(PROCESS)),
    ("root", Fields(&[("path", Other), ("readonly", Other)])),
    ("solaris", Other),
    ("vm", Other),
    ("windows", Other),
    ("zos", Other),
]);

const HOOKS: &[(&str, Shape)] = &[
    ("createContainer", Fields(HOOK)),
    ("createRuntime", Fields(HOOK)),
    ("poststart", Fields(HOOK)),
    ("poststop", Fields(HOOK)),
    ("prestart", Fields(HOOK)),
    ("startContainer", Fields(HOOK)),
];

const HOOK: &[(&str, Shape)] = &[("args", Other), ("env", Other), ("path", Other), ("timeout", Other)];

const LINUX: &[(&str, Shape)] = &[
    ("cgroupsPath", Other),
    ("devices", Fields(DEVICE)),
    ("gidMappings", Fields(MAPPING)),
    ("intelRdt", Other),
    ("maskedPaths", Other),
    ("memoryPolicy", Other),
    ("mountLabel", Other),
    ("namespaces", Fields(&[("path", Other), ("type", Other)])),
    ("netDevices", Other),
    ("personality", Other),
    ("readonlyPaths", Other),
    ("resources", Fields(RESOURCES)),
    ("rootfsPropagation", Other),
    ("seccomp", Fields(SECCOMP)),
    ("sysctl", Other),
    ("timeOffsets", Other),
    ("uidMappings", Fields(MAPPING)),
];

const SECCOMP: &[(&str, Shape)] = &[
    ("architectures", Other),
    ("defaultAction", Other),
    ("defaultErrnoRet", Other),
    ("flags", Other),
    ("listenerMetadata", Other),
    ("listenerPath", Other),
    ("syscalls", Fields(SECCOMP_RULE)),
];

const SECCOMP_RULE: &[(&str, Shape)] =
    &[("action", Other), ("args", Fields(SECCOMP_ARGUMENT)), ("errnoRet", Other), ("names", Other)];

const SECCOMP_ARGUMENT: &[(&str, Shape)] =
    &[("index", Other), ("op", Other), ("value", Other), ("valueTwo", Other)];

const DEVICE: &[(&str, Shape)] = &[
    ("fileMode", Other),
    ("gid", Other),
    ("major", Other),
    ("minor", Other),
    ("path", Other),
    ("type", Other),
    ("uid", Other),
];

const MAPPING: &[(&str, Shape)] = &[("containerID", Other), ("hostID", Other), ("size", Other)];

const RESOURCES: &[(&str, Shape)] = &[
    ("blockIO", Other),
    ("cpu", Other),
    ("devices", Fields(RULE)),
    ("hugepageLimits", Other),
    ("memory", Other),
    ("network", Other),
    ("pids", Other),
    ("rdma", Other),
    ("unified", Other),
];

const RULE: &[(&str, Shape)] =
    &[("access", Other), ("allow", Other), ("major", Other), ("minor", Other), ("type", Other)];

const MOUNT: &[(&str, Shape)] = &[
    ("destination", Other),
    ("gidMappings", Fields(MAPPING)),
    ("options", Other),
    ("source", Other),
    ("type", Other),
    ("uidMappings", Fields(MAPPING)),
];

const PROCESS: &[(&str, Shape)] = &[
    ("apparmorProfile", Other),
    ("args", Other),
    ("capabilities", Fields(CAPABILITIES)),
    ("commandLine", Other),
    ("consoleSize", Other),
    ("cwd", Other),
    ("env", Own),
    ("execCPUAffinity", Other),
    ("ioPriority", Other),
    ("noNewPrivileges", Other),
    ("oomScoreAdj", Other),
    ("rlimits", Other),
    ("scheduler", Other),
    ("selinuxLabel", Other),
    ("terminal", Other),
    ("user", Fields(USER)),
];

const CAPABILITIES: &[(&str, Shape)] = &[
    ("ambient", Other),
    ("bounding", Other),
    ("effective", Other),
    ("inheritable", Other),
    ("permitted", Other),
];

const USER: &[(&str, Shape)] =
    &[("additionalGids", Other), ("gid", Other), ("uid", Other), ("umask", Other), ("username", Other)];

/// Reads a whole config.json.
///
/// # Errors
/// When it is no JSON, or some runtime would read other fields in it than we do.
pub(crate) fn read(text: &[u8]) -> Result<Value, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_slice(text);
    let json = Place { outer: None, name: "", shape: &CONFIG }.deserialize(&mut reader)?;
    reader.end()?;
    Ok(json)
}

/// A place in the file: how its fields are read, and how messages name it.
#[derive(Clone, Copy)]
struct Place<'a> {
    outer: Option<&'a Place<'a>>,
    name: &'a str,
    shape: &'static Shape,
}

impl Place<'_> {
    /// The place of the field `key`.
    fn field<'b, E: Error>(&'b self, key: &'b str) -> Result<Place<'b>, E> {
        let place = |shape| Place { outer: Some(self), name: key, shape };
        let Fields(fields) = self.shape else { return Ok(place(self.shape)) };
        match fields.iter().find(|(name, _)| equal_to_go(name, key)) {
            Some((name, shape)) if *name == key => Ok(place(shape)),
            Some((name, _)) => Err(E::custom(format_args!(
                "key {key:?} in {self} is {name:?} to some runtimes and none to others; write {name:?}, and once"
            ))),
            None => Ok(place(&Other)),
        }
    }

    /// The next key of an object at this place.
    fn key<'de, A: MapAccess<'de>>(
        &self,
        entries: &mut A,
        map: &Map<String, Value>,
    ) -> Result<Option<String>, A::Error> {
        let Some(key) = entries.next_key::<String>()? else { return Ok(None) };
        if map.contains_key(&key) {
            return Err(A::Error::custom(format_args!(
                "key {key:?} stands in {self} twice, and runtimes differ in which one counts; write it once"
            )));
        }
        self.refuse_nul(&key)?;
        Ok(Some(key))
    }

    /// Refuses a NUL in a text that runtimes read. The container's own texts have rules of their own, with
    /// messages that name the variable.
    fn refuse_nul<E: Error>(&self, text: &str) -> Result<(), E> {
        if matches!(self.shape, Own) || !text.contains('\0') {
            return Ok(());
        }
        Err(E::custom(format_args!("{text:?} in {self} ends at its NUL to some runtimes; leave the NUL out")))
    }
}

/// Written as `linux.resources.devices`; the whole file is `config.json`.
impl fmt::Display for Place<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.outer {
            None => formatter.write_str("config.json"),
            Some(outer) if outer.outer.is_none() => write!(formatter, "{}", self.name.escape_debug()),
            Some(outer) => write!(formatter, "{outer}.{}", self.name.escape_debug()),
        }
    }
}

/// Whether Go takes `key` for the field `name`, whose letters are ASCII. Two other letters fold to ASCII ones
/// too.
fn equal_to_go(name: &str, key: &str) -> bool {
    let fold = |letter: char| match letter {
        '\u{212A}' => 'k',
        '\u{017F}' => 's',
        other => other.to_ascii_lowercase(),
    };
    name.chars().map(fold).eq(key.chars().map(fold))
}

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Place<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number.into()))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Value, E> {
        self.refuse_nul(text)?;
        Ok(Value::String(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = entries.next_element_seed(self)? {
            list.push(value);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = self.key(&mut entries, &map)? {
            if map.is_empty() && key == NUMBER {
                return number(&mut entries);
            }
            let value = entries.next_value_seed(self.field(&key)?)?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// A number, with its text kept.
fn number<'de, A: MapAccess<'de>>(entries: &mut A) -> Result<Value, A::Error> {
    let text: String = entries.next_value()?;
    text.parse::<Number>().map(Value::Number).map_err(A::Error::custom)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn what_is_read_is_what_serde_reads_with_every_text_and_order_kept() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        let texts = fs::read_dir(folder).unwrap().filter_map(|entry| fs::read(entry.unwrap().path()).ok());
        let odd =
            br#"{"b": [1e2, 18446744073709551616, -0, 1.50], "a": {"b": null, "A": true}, "x": "\u00e9"}"#;
        let mut count = 0;
        for text in texts.chain([odd.to_vec()]) {
            let want: Value = serde_json::from_slice(&text).unwrap();
            let found =
                read(&text).unwrap_or_else(|error| panic!("{error}: {:.60}", String::from_utf8_lossy(&text)));
            assert_eq!(serde_json::to_string(&found).unwrap(), serde_json::to_string(&want).unwrap());
            count += 1;
        }
        assert!(count > 30, "{count} bundles");
    }

    #[test]
    fn a_key_that_go_would_take_for_another_is_refused_by_its_name_and_place() {
        for (text, parts) in [
            (r#"{"Linux": {}}"#, &["\"Linux\"", "in config.json", "\"linux\""][..]),
            (r#"{"linux": {}, "LINUX": {}}"#, &["\"LINUX\"", "config.json"]),
            (r#"{"hoo\u212as": {}}"#, &["hooks"]),
            (r#"{"hooK\u017f": {}}"#, &["hooks"]),
            (r#"{"proce\u017f\u017F": {}}"#, &["process"]),
            (r#"{"process": {"Env": []}}"#, &["\"Env\"", "in process", "\"env\""]),
            (r#"{"process": {"user": {"additionalGIDs": []}}}"#, &["in process.user"]),
            (r#"{"process": {"capabilities": {"Bounding": []}}}"#, &["in process.capabilities"]),
            (r#"{"root": {"Path": "/"}}"#, &["in root"]),
            (r#"{"linux": {"resources": {"Devices": []}}}"#, &["in linux.resources"]),
            (
                r#"{"linux": {"resources": {"devices": [{}, {"Allow": true}]}}}"#,
                &["in linux.resources.devices"],
            ),
            (r#"{"linux": {"devices": [{"Path": "/dev/nvidia0"}]}}"#, &["in linux.devices"]),
            (r#"{"linux": {"namespaces": [{"Type": "user"}]}}"#, &["in linux.namespaces"]),
            (r#"{"linux": {"uidMappings": [{"hostId": 0}]}}"#, &["in linux.uidMappings"]),
            (r#"{"mounts": [{"Destination": "/"}]}"#, &["in mounts"]),
            (r#"{"hooks": {"preStart": []}}"#, &["in hooks"]),
            (r#"{"hooks": {"prestart": [{"Path": "/x"}]}}"#, &["in hooks.prestart"]),
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_refused_at_every_depth() {
        for text in [
            r#"{"linux": {}, "linux": {}}"#,
            r#"{"annotations": {"a": "1", "a": "2"}}"#,
            r#"{"annotations": {"a": "1", "\u0061": "2"}}"#,
            r#"{"mounts": [{"type": "bind", "source": "/", "type": "tmpfs"}]}"#,
            r#"{"vendor": {"x": [{"y": 1, "y": 1}]}}"#,
        ] {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("twice"), "{text}: {error}");
        }
    }

    #[test]
    fn a_text_that_c_would_cut_is_refused_but_for_the_containers_own() {
        for (text, refused) in [
            (r#"{"linux\u0000x": {}}"#, true),
            (r#"{"process": {"capabilities": {"bounding": ["CAP_SYS_ADMIN\u0000"]}}}"#, true),
            (r#"{"hooks": {"prestart": [{"path": "/x\u0000y"}]}}"#, true),
            (r#"{"process": {"env": ["A=b\u0000"]}, "annotations": {"a": "\u0000"}}"#, false),
        ] {
            assert_eq!(read(text.as_bytes()).is_err(), refused, "{text}");
        }
    }

    #[test]
    fn keys_of_others_and_the_containers_own_stay_as_they_are() {
        for text in [
            r#"{"annotations": {"Linux": "a", "linux": "b", "LINUX": "c"}}"#,
            r#"{"vendor": {"Linux": 1, "linux": 2}, "linuX2": {}, "linux ": {}}"#,
            r#"{"linux": {"sysctl": {"Devices": "x"}, "seccomp": {"Hooks": 1}}}"#,
            r#"{"linux": null, "mounts": null, "process": 7, "hooks": [{"path": 1}]}"#,
        ] {
            assert!(read(text.as_bytes()).is_ok(), "{text}: {:?}", read(text.as_bytes()));
        }
    }
}
