//! The grants of the two files, and the effect of a missing file.

use gpushare_region::{USAGE_LEN, empty_usage_header};

use crate::container::{Container, UUID, open};

/// G8: a file that is missing, too short or foreign grants nothing and harms no process.
#[test]
fn files_that_are_missing_short_or_foreign_grant_nothing() {
    type Harm<'a> = (&'a str, Option<Vec<u8>>);
    let short = std::fs::read(Container::new(1 << 30).folder.path().join("limits")).unwrap()[..100].to_vec();
    let harms: [Harm<'_>; 6] = [
        ("limits", None),
        ("limits", Some(short)),
        ("limits", Some(vec![b'x'; 4096])),
        ("usage", None),
        ("usage", Some(empty_usage_header().to_vec())),
        ("usage", Some(vec![0; USAGE_LEN])),
    ];
    for (index, (name, bytes)) in harms.iter().enumerate() {
        let container = Container::new(1 << 30);
        let path = container.folder.path().join(name);
        match bytes {
            Some(bytes) => std::fs::write(path, bytes).unwrap(),
            None => std::fs::remove_file(path).unwrap(),
        }
        let book = open(container.files());
        assert!(!book.reserve(0, 1), "harm {index} to {name}");
        book.release(0, 5);
        assert_eq!(book.used(0), 0, "harm {index} to {name}");
    }
}

/// Case 16: a device is found by its UUID, and a device that is not granted has no line.
#[test]
fn case_16_devices_are_matched_by_uuid() {
    let container = Container::new(1 << 30);
    let book = open(container.files());
    assert_eq!((book.device(&UUID), book.device(&[8; 16])), (Some(0), None));
    for line in [1, 15, 16, 255] {
        assert!(!book.reserve(line, 1), "line {line}");
    }
}
