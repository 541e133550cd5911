//! Reading a tar archive header by header.
//!
//! The `tar` crate knows the fields; the loop is ours, because what an archive says about itself
//! (long names, extended attributes, sizes) has to be bounded before it is read.

use std::collections::BTreeMap;
use std::io::{self, Read};

use tar::{EntryType, Header};

/// What precedes an entry (long names, pax records) is at most this long, in bytes.
const EXTENSION_BYTES_MAX: u64 = 1 << 20;
/// How many of those may precede one entry.
const EXTENSIONS_MAX: usize = 8;
/// Blocks of an archive, in bytes.
const BLOCK: usize = 512;

/// Why an archive cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("reading it failed")]
    Read(#[source] io::Error),
    #[error("it breaks off within an entry")]
    CutOff,
    #[error("it holds a header that is none")]
    Header,
    #[error("a name or an attribute is longer than {EXTENSION_BYTES_MAX} bytes, or never ends")]
    Extension,
    #[error("it holds sparse entries, which are not supported")]
    Sparse,
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Folder,
    File,
    HardLink,
    SymbolicLink,
    /// A device, a pipe, or what nobody knows.
    Special,
}

/// The head of an entry, with all that precedes it taken into account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: Vec<u8>,
    pub(crate) kind: Kind,
    /// Of a link.
    pub(crate) target: Vec<u8>,
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) uid: u64,
    pub(crate) gid: u64,
    pub(crate) modified_s: i64,
    /// Extended attributes by name.
    pub(crate) attributes: BTreeMap<String, Vec<u8>>,
}

/// An archive being read.
#[derive(Debug)]
pub(crate) struct Archive<R> {
    source: R,
    /// What is left of the current entry, and what fills its last block.
    left: u64,
    padding: u64,
}

impl<R: Read> Archive<R> {
    pub(crate) fn new(source: R) -> Self {
        Self {
            source,
            left: 0,
            padding: 0,
        }
    }

    /// The head of the next entry, or the end.
    ///
    /// # Errors
    /// The archive is broken or does not keep the bounds.
    pub(crate) fn next(&mut self) -> Result<Option<Head>, ArchiveError> {
        let mut before = Extensions::default();
        for _ in 0..=EXTENSIONS_MAX {
            self.skip_rest()?;
            let Some(header) = self.header()? else {
                return Ok(None);
            };
            let size = header.entry_size().map_err(|_| ArchiveError::Header)?;
            self.begin(size);
            match header.entry_type() {
                EntryType::GNULongName => before.name = Some(text(self.extension()?)),
                EntryType::GNULongLink => before.target = Some(text(self.extension()?)),
                EntryType::XHeader => before.records = records(&self.extension()?)?,
                EntryType::XGlobalHeader => {
                    self.extension()?;
                }
                EntryType::GNUSparse => return Err(ArchiveError::Sparse),
                _ => return self.head(&header, before).map(Some),
            }
        }
        Err(ArchiveError::Extension)
    }

    /// The content of the entry whose head was read last.
    pub(crate) fn content(&mut self) -> impl Read + '_ {
        Content(self)
    }

    /// Reads on to the end of the source, which belongs to its digest.
    ///
    /// # Errors
    /// Reading failed.
    pub(crate) fn finish(mut self) -> Result<(), ArchiveError> {
        io::copy(&mut self.source, &mut io::sink())
            .map(|_| ())
            .map_err(ArchiveError::Read)
    }

    fn begin(&mut self, size: u64) {
        self.left = size;
        let block = BLOCK as u64;
        self.padding = (block - size % block) % block;
    }

    fn header(&mut self) -> Result<Option<Header>, ArchiveError> {
        let mut block = [0; BLOCK];
        if !self.read_block(&mut block)? {
            return Ok(None);
        }
        // One block of zeros is the end; more may follow, and nobody reads it.
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let header = Header::from_byte_slice(&block);
        let told = header.cksum().map_err(|_| ArchiveError::Header)?;
        if told != checksum(&block) {
            return Err(ArchiveError::Header);
        }
        Ok(Some(header.clone()))
    }

    /// False at the end.
    fn read_block(&mut self, block: &mut [u8; BLOCK]) -> Result<bool, ArchiveError> {
        let mut filled = 0;
        while filled < BLOCK {
            let read = self.source.read(&mut block[filled..]);
            match read {
                Ok(0) if filled == 0 => return Ok(false),
                Ok(0) => return Err(ArchiveError::CutOff),
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(ArchiveError::Read(error)),
            }
        }
        Ok(true)
    }

    fn extension(&mut self) -> Result<Vec<u8>, ArchiveError> {
        if self.left > EXTENSION_BYTES_MAX {
            return Err(ArchiveError::Extension);
        }
        let mut bytes = Vec::new();
        let read = self.content().read_to_end(&mut bytes);
        read.map_err(ArchiveError::Read)?;
        if self.left > 0 {
            return Err(ArchiveError::CutOff);
        }
        Ok(bytes)
    }

    fn skip_rest(&mut self) -> Result<(), ArchiveError> {
        let skip = self
            .left
            .checked_add(self.padding)
            .ok_or(ArchiveError::Header)?;
        let skipped = io::copy(&mut (&mut self.source).take(skip), &mut io::sink());
        if skipped.map_err(ArchiveError::Read)? < skip {
            return Err(ArchiveError::CutOff);
        }
        self.begin(0);
        Ok(())
    }

    fn head(&mut self, header: &Header, before: Extensions) -> Result<Head, ArchiveError> {
        let mut records = before.records;
        if records.keys().any(|key| key.starts_with("GNU.sparse.")) {
            return Err(ArchiveError::Sparse);
        }
        let header_error = |_| ArchiveError::Header;
        let kind = kind(header.entry_type());
        let size = match (kind, number(&records, "size")?) {
            // Only files are followed by blocks, whatever the size of a link says.
            (Kind::Folder | Kind::HardLink | Kind::SymbolicLink, _) => 0,
            (_, Some(size)) => size,
            (_, None) => header.entry_size().map_err(header_error)?,
        };
        self.begin(size);
        let fields = header.as_old();
        let owner = |key, field: &[u8], own: io::Result<u64>| match number(&records, key)? {
            Some(id) => Ok(id),
            None if is_blank(field) => Ok(0),
            None => own.map_err(header_error),
        };
        let uid = owner("uid", &fields.uid, header.uid())?;
        let gid = owner("gid", &fields.gid, header.gid())?;
        let modified = records.get("mtime").and_then(|value| seconds(value));
        let modified_s = match modified {
            Some(seconds) => seconds,
            None if is_blank(&fields.mtime) => 0,
            None => i64::try_from(header.mtime().map_err(header_error)?).unwrap_or(i64::MAX),
        };
        let name = records.remove("path").or(before.name);
        let target = records.remove("linkpath").or(before.target);
        Ok(Head {
            name: name.unwrap_or_else(|| header.path_bytes().into_owned()),
            kind,
            target: target
                .or_else(|| header.link_name_bytes().map(|bytes| bytes.into_owned()))
                .unwrap_or_default(),
            size,
            mode: header.mode().map_err(header_error)? & 0o7777,
            uid,
            gid,
            modified_s,
            attributes: attributes(records),
        })
    }
}

struct Content<'a, R>(&'a mut Archive<R>);

impl<R: Read> Read for Content<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.0.left).unwrap_or(usize::MAX);
        let want = want.min(buffer.len());
        let count = self.0.source.read(&mut buffer[..want])?;
        self.0.left -= count as u64;
        Ok(count)
    }
}

/// What precedes an entry.
#[derive(Debug, Default)]
struct Extensions {
    name: Option<Vec<u8>>,
    target: Option<Vec<u8>>,
    records: BTreeMap<String, Vec<u8>>,
}

/// Whether a number was left out, as some writers do with zero.
fn is_blank(field: &[u8]) -> bool {
    field.iter().all(|byte| matches!(byte, 0 | b' '))
}

fn kind(entry_type: EntryType) -> Kind {
    match entry_type {
        EntryType::Regular | EntryType::Continuous => Kind::File,
        EntryType::Directory => Kind::Folder,
        EntryType::Link => Kind::HardLink,
        EntryType::Symlink => Kind::SymbolicLink,
        _ => Kind::Special,
    }
}

/// The sum of a header's bytes, its own field counted as spaces.
fn checksum(block: &[u8; BLOCK]) -> u32 {
    let outside = block[..148].iter().chain(&block[156..]);
    outside.map(|byte| u32::from(*byte)).sum::<u32>() + 8 * u32::from(b' ')
}

/// A name that ends at its first NUL.
fn text(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.iter().position(|byte| *byte == 0);
    bytes.truncate(end.unwrap_or(bytes.len()));
    bytes
}

/// Reads pax records: `<length> <key>=<value>\n`, the length counting all of it.
fn records(mut bytes: &[u8]) -> Result<BTreeMap<String, Vec<u8>>, ArchiveError> {
    let mut records = BTreeMap::new();
    while !bytes.is_empty() {
        let (record, rest) = split_record(bytes).ok_or(ArchiveError::Header)?;
        let equals = record.iter().position(|byte| *byte == b'=');
        let (key, value) = record.split_at(equals.ok_or(ArchiveError::Header)?);
        let key = std::str::from_utf8(key).map_err(|_| ArchiveError::Header)?;
        records.insert(key.to_owned(), value[1..].to_vec());
        bytes = rest;
    }
    Ok(records)
}

fn split_record(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let record = bytes.get(space + 1..length)?;
    Some((record.strip_suffix(b"\n")?, &bytes[length..]))
}

fn number(records: &BTreeMap<String, Vec<u8>>, key: &str) -> Result<Option<u64>, ArchiveError> {
    let Some(value) = records.get(key) else {
        return Ok(None);
    };
    let text = std::str::from_utf8(value).map_err(|_| ArchiveError::Header)?;
    text.parse().map(Some).map_err(|_| ArchiveError::Header)
}

/// Whole seconds of a time such as `1700000000.25`.
fn seconds(value: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(value).ok()?;
    text.split('.').next()?.parse().ok()
}

fn attributes(records: BTreeMap<String, Vec<u8>>) -> BTreeMap<String, Vec<u8>> {
    let named = records.into_iter().filter_map(|(key, value)| {
        let name = key.strip_prefix("SCHILY.xattr.")?;
        Some((name.to_owned(), value))
    });
    named.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_by_their_length() {
        let read = records(b"9 path=a\n23 SCHILY.xattr.x=\n=\0y\n").unwrap();
        assert_eq!(read["path"], b"a");
        assert_eq!(read["SCHILY.xattr.x"], b"\n=\0y");
        for broken in [
            &b"x"[..],
            b"5 a=b\n",
            b"99 a=b\n",
            b"0 a=b\n",
            b"18446744073709551615 a=b\n",
            b"6 abc\n",
            b"6 a=bc",
            b"1\n",
        ] {
            assert!(records(broken).is_err(), "{broken:?}");
        }
    }

    #[test]
    fn an_archive_that_breaks_off_is_no_short_archive() {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_size(1000);
        header.set_mode(0o644);
        builder
            .append_data(&mut header, "a", &[7; 1000][..])
            .unwrap();
        let whole = builder.into_inner().unwrap();
        for length in [1, 511, 513, 1500] {
            let mut archive = Archive::new(&whole[..length]);
            let read = archive.next().and_then(|_| archive.next());
            assert!(matches!(read, Err(ArchiveError::CutOff)), "{length}");
        }
        let mut archive = Archive::new(&whole[..]);
        assert_eq!(archive.next().unwrap().unwrap().size, 1000);
        assert!(archive.next().unwrap().is_none());
    }

    #[test]
    fn what_precedes_an_entry_is_bounded() {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::GNULongName);
        header.set_size(1 << 40);
        header.set_cksum();
        let endless = header.as_bytes().chain(io::repeat(b'x'));
        let refused = Archive::new(endless).next();
        assert!(matches!(refused, Err(ArchiveError::Extension)));
        header.set_size(0);
        header.set_cksum();
        let many = header.as_bytes().repeat(100);
        let refused = Archive::new(&many[..]).next();
        assert!(matches!(refused, Err(ArchiveError::Extension)));
    }
}
