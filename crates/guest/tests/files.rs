//! File contents over plain HTTP (wire contract 2.2 and 2.4; field cases BC-049 to BC-061).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
};

use bytes::Bytes;
use flate2::{Compression, read::GzDecoder, write::GzEncoder};
use futures::stream;
use http::Method;
use http_body_util::{BodyExt, StreamBody};
use sandhold_guest::files::signature::{FileOperation, sign};
use sandhold_types::Token;
use serde_json::json;
use support::{ACCESS_TOKEN, Agent, USER_ID, files, mode_of, owner_of};

const RAW: [(&str, &str); 2] = [
    ("x-access-token", ACCESS_TOKEN),
    ("content-type", "application/octet-stream"),
];

fn pattern(length: usize) -> Vec<u8> {
    (0..length)
        .map(|index| u8::try_from((index * 31 + index / 251) % 256).unwrap())
        .collect()
}

fn gunzip(bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    GzDecoder::new(bytes).read_to_end(&mut plain).unwrap();
    plain
}

#[tokio::test]
async fn bytes_come_back_as_they_went() {
    // BC-049
    let agent = Agent::start().await;
    let mut contents = vec![0xff, 0xd8, 0x89, 0x50, 0x00, 0x0a, 0x0d, 0x1a];
    contents.extend(pattern(1 << 20));
    let written = agent.put("x.bin", contents.clone()).await;
    assert_eq!(written.status, 200);
    let path = agent.home().join("x.bin").display().to_string();
    assert_eq!(
        written.json(),
        json!([{ "name": "x.bin", "type": "file", "path": path }])
    );

    let plain = agent.get(&files("x.bin"), &[]).await;
    assert_eq!(plain.header("content-length"), Some("1048584"));
    assert_eq!(plain.header("content-encoding"), None);
    assert!(plain.body == contents);
    let zipped = agent
        .get(&files("x.bin"), &[("accept-encoding", "gzip, deflate")])
        .await;
    assert_eq!(zipped.header("content-encoding"), Some("gzip"));
    assert!(gunzip(&zipped.body) == contents);
}

#[tokio::test]
async fn an_empty_file_is_a_file() {
    // BC-050
    let agent = Agent::start().await;
    assert_eq!(agent.put("empty", "").await.status, 200);
    for accept in ["identity", "gzip"] {
        let read = agent
            .get(&files("empty"), &[("accept-encoding", accept)])
            .await;
        assert_eq!((read.status.as_u16(), read.body.len()), (200, 0));
        assert_eq!(read.header("content-length"), Some("0"));
    }
    let range = agent.get(&files("empty"), &[("range", "bytes=0-1")]).await;
    assert_eq!(range.status, 416);
}

#[tokio::test]
async fn parts_and_conditions_are_answered_without_compression() {
    let agent = Agent::start().await;
    agent.put("f.txt", "0123456789").await;
    let part = agent
        .get(
            &files("f.txt"),
            &[("range", "bytes=2-4"), ("accept-encoding", "gzip")],
        )
        .await;
    assert_eq!((part.status.as_u16(), &part.body[..]), (206, &b"234"[..]));
    assert_eq!(part.header("content-range"), Some("bytes 2-4/10"));
    assert_eq!(part.header("content-encoding"), None);
    assert_eq!(part.header("content-type"), Some("text/plain"));
    let tag = part.header("etag").unwrap().to_owned();
    let unchanged = agent.get(&files("f.txt"), &[("if-none-match", &tag)]).await;
    assert_eq!((unchanged.status.as_u16(), unchanged.body.len()), (304, 0));
    let beyond = agent.get(&files("f.txt"), &[("range", "bytes=10-")]).await;
    assert_eq!(beyond.status, 416);
    assert_eq!(beyond.header("content-range"), Some("bytes */10"));
    agent.put("f.txt", "changed!").await;
    let stale = [("range", "bytes=2-4"), ("if-range", tag.as_str())];
    assert_eq!(agent.get(&files("f.txt"), &stale).await.body, "changed!");
    let refused = agent
        .get(&files("f.txt"), &[("accept-encoding", "identity;q=0")])
        .await;
    assert_eq!(refused.status, 406);
    let head = agent.call(Method::HEAD, &files("f.txt"), "").await;
    assert_eq!(head.header("content-length"), Some("8"));
    assert!(head.body.is_empty());
}

#[tokio::test]
async fn names_of_all_kinds_reach_the_client_safely() {
    // BC-053
    let agent = Agent::start().await;
    for (name, encoded) in [
        ("报告 v2.pdf", "%E6%8A%A5%E5%91%8A%20v2.pdf"),
        ("naïve;name=\".txt", "na%C3%AFve%3Bname%3D%22.txt"),
        ("a\r\nX-Evil: 1", "a%0D%0AX-Evil%3A%201"),
    ] {
        assert_eq!(agent.put(name, "x").await.status, 200, "{name}");
        let read = agent.get(&files(name), &[]).await;
        let disposition = read.header("content-disposition").unwrap();
        assert!(
            disposition.ends_with(&format!("filename*=UTF-8''{encoded}")),
            "{disposition}"
        );
        assert_eq!(read.header("x-evil"), None);
    }
}

#[tokio::test]
async fn overwriting_keeps_modes_and_new_files_belong_to_the_caller() {
    // BC-058
    let agent = Agent::start().await;
    let home = agent.home();
    fs::write(home.join("script"), "old and longer").unwrap();
    fs::set_permissions(home.join("script"), fs::Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(home.join("script"), Some(USER_ID), Some(USER_ID)).unwrap();
    fs::write(home.join("secret"), "root's").unwrap();
    fs::set_permissions(home.join("secret"), fs::Permissions::from_mode(0o600)).unwrap();

    assert_eq!(agent.put("script", "new").await.status, 200);
    assert_eq!(fs::read(home.join("script")).unwrap(), b"new");
    assert_eq!(mode_of(&home.join("script")), 0o755);
    for answer in [
        agent.put("secret", "x").await,
        agent.get(&files("secret"), &[]).await,
        agent.put("/root/new", "x").await,
    ] {
        assert_eq!(answer.status, 403);
    }
    assert_eq!(fs::read(home.join("secret")).unwrap(), b"root's");

    agent.put("a/b/c/new", "x").await;
    for path in ["a", "a/b", "a/b/c", "a/b/c/new"] {
        assert_eq!(owner_of(&home.join(path)), USER_ID, "{path}");
    }
    let as_root = format!(
        "{}&username=root",
        files(&home.join("r/f").display().to_string())
    );
    assert_eq!(
        agent.send(Method::POST, &as_root, &RAW, "x").await.status,
        200
    );
    assert_eq!(owner_of(&home.join("r")), 0);
    assert_eq!(owner_of(&home.join("r/f")), 0);
    let unknown = format!("{}&username=nobody-here", files("x"));
    assert_eq!(agent.get(&unknown, &[]).await.status, 401);
}

#[tokio::test]
async fn uploads_of_any_size_need_no_memory() {
    // BC-059
    let agent = Agent::start().await;
    agent.put("warm", pattern(64 << 10)).await;
    let before = agent.resident_bytes();
    for length in [96 << 10, 127 << 10, 128 << 10, 129 << 10, 1 << 20] {
        let contents = pattern(length);
        assert_eq!(agent.put("sized", contents.clone()).await.status, 200);
        assert!(
            fs::read(agent.home().join("sized")).unwrap() == contents,
            "{length}"
        );
    }
    // Without a length, in pieces.
    let piece = Bytes::from(pattern(1 << 20));
    let pieces = stream::iter(
        (0..100).map(move |_| Ok::<_, std::io::Error>(hyper::body::Frame::data(piece.clone()))),
    );
    let body = BodyExt::boxed(StreamBody::new(pieces));
    let answer = agent
        .send_body(Method::POST, &files("chunked"), &RAW, body)
        .await;
    assert_eq!(answer.status, 200);
    assert_eq!(
        fs::metadata(agent.home().join("chunked")).unwrap().len(),
        100 << 20
    );
    assert!(agent.resident_bytes() < before + (32 << 20));
}

#[tokio::test]
async fn metadata_comes_in_headers_and_stays_with_the_file() {
    // BC-061
    let agent = Agent::start().await;
    let upload = async |extra: &[(&str, &str)]| {
        let headers: Vec<_> = RAW.iter().chain(extra).copied().collect();
        agent.send(Method::POST, &files("m"), &headers, "x").await
    };
    let written = upload(&[("X-Metadata-Author", "zoe"), ("x-metadata-K2", "v")]).await;
    assert_eq!(
        written.json()[0]["metadata"],
        json!({ "author": "zoe", "k2": "v" })
    );
    let rename = json!({ "source": "m", "destination": "n" });
    let renamed = agent
        .unary("/filesystem.Filesystem/Move", rename)
        .await
        .json();
    assert_eq!(
        renamed["entry"]["metadata"],
        json!({ "author": "zoe", "k2": "v" })
    );

    agent
        .unary(
            "/filesystem.Filesystem/Move",
            json!({ "source": "n", "destination": "m" }),
        )
        .await;
    upload(&[("x-metadata-k2", "w")]).await;
    let stat = agent
        .unary("/filesystem.Filesystem/Stat", json!({ "path": "m" }))
        .await
        .json();
    assert_eq!(stat["entry"]["metadata"], json!({ "k2": "w" }));

    assert_eq!(upload(&[("x-metadata-author", "Zoë")]).await.status, 400);
    assert_eq!(
        upload(&[("x-metadata-author", &"v".repeat(5000))])
            .await
            .status,
        400
    );
    let names: Vec<String> = (0..200)
        .map(|index| format!("x-metadata-k{index}"))
        .collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), "v")).collect();
    // As many as the filesystem keeps; else the words for a full disk, never a half-kept set
    // behind a success.
    let answer = upload(&many).await;
    match answer.status.as_u16() {
        200 => {
            let stat = agent
                .unary("/filesystem.Filesystem/Stat", json!({ "path": "m" }))
                .await;
            assert_eq!(
                stat.json()["entry"]["metadata"].as_object().unwrap().len(),
                200
            );
        }
        other => assert_eq!(other, 507),
    }
}

fn form(parts: &[(&str, Option<&str>, &str)]) -> String {
    let mut body = String::new();
    for (field, filename, contents) in parts {
        let filename = filename.map_or(String::new(), |name| format!("; filename=\"{name}\""));
        body += &format!(
            "--limit\r\nContent-Disposition: form-data; name=\"{field}\"{filename}\r\n\r\n\
             {contents}\r\n"
        );
    }
    body + "--limit--\r\n"
}

const FORM: [(&str, &str); 2] = [
    ("x-access-token", ACCESS_TOKEN),
    ("content-type", "multipart/form-data; boundary=limit"),
];

#[tokio::test]
async fn forms_hold_one_file_or_several() {
    let agent = Agent::start().await;
    let one = form(&[("file", Some("ignored"), "1")]);
    let answer = agent
        .send(Method::POST, &files("one.txt"), &FORM, one)
        .await;
    assert_eq!(answer.json()[0]["name"], "one.txt");
    let two = form(&[
        ("file", Some("two.txt"), "2"),
        ("other", None, "x"),
        ("file", Some("d/three.txt"), "3"),
    ]);
    let answer = agent.send(Method::POST, "/files", &FORM, two).await.json();
    assert_eq!(answer.as_array().unwrap().len(), 2);
    assert_eq!(fs::read(agent.home().join("d/three.txt")).unwrap(), b"3");

    for wrong in [
        form(&[("other", None, "x")]),
        form(&[("file", None, "x")]),
        form(&[("file", Some("same"), "1"), ("file", Some("./same"), "2")]),
        String::from("--limit\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\""),
        String::from("garbage"),
    ] {
        let answer = agent
            .send(Method::POST, "/files", &FORM, wrong.clone())
            .await;
        assert_eq!(answer.status, 400, "{wrong}");
        assert_eq!(answer.json()["code"], 400);
    }
}

#[tokio::test]
async fn compressed_uploads_arrive_plain() {
    let agent = Agent::start().await;
    let contents = pattern(300_000);
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(&contents).unwrap();
    let zipped = encoder.finish().unwrap();
    let headers = [RAW[0], RAW[1], ("content-encoding", "gzip")];
    let answer = agent
        .send(Method::POST, &files("z"), &headers, zipped.clone())
        .await;
    assert_eq!(answer.status, 200);
    assert!(fs::read(agent.home().join("z")).unwrap() == contents);

    // Damaged: an error, and no half of a file.
    let half = zipped[..zipped.len() / 2].to_vec();
    let answer = agent
        .send(Method::POST, &files("half"), &headers, half)
        .await;
    assert_eq!(answer.status, 400);
    assert!(!agent.home().join("half").exists());
    let headers = [RAW[0], RAW[1], ("content-encoding", "br")];
    assert_eq!(
        agent
            .send(Method::POST, &files("z"), &headers, "x")
            .await
            .status,
        415
    );
}

#[tokio::test]
async fn what_is_no_file_is_refused_with_its_reason() {
    let agent = Agent::start().await;
    let fifo = agent.home().join("fifo");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    std::os::unix::fs::chown(&fifo, Some(USER_ID), None).unwrap();
    let long = "x".repeat(10_000);
    for (path, status) in [
        ("missing", 404),
        ("", 400),
        ("~", 400),
        ("/dev/null", 400),
        ("fifo", 400),
        ("~root/x", 400),
        ("a\u{0}b", 400),
        (long.as_str(), 400),
        ("/etc/passwd/x", 400),
    ] {
        let answer = agent.get(&files(path), &[]).await;
        assert_eq!(answer.status, status, "{path:?}");
        assert_eq!(answer.json()["code"], status);
    }
    assert_eq!(agent.put("~", "x").await.status, 400);
    assert_eq!(agent.put("fifo", "x").await.status, 400);
    let no_path = agent.send(Method::POST, "/files", &RAW, "x").await;
    assert_eq!(no_path.status, 400);
    let odd = [RAW[0], ("content-type", "text/html")];
    assert_eq!(
        agent
            .send(Method::POST, &files("x"), &odd, "x")
            .await
            .status,
        415
    );
    // Climbing out of the home is no trick: paths are absolute, rights decide.
    assert_eq!(
        agent
            .get(&files("../../../../../../etc/hostname"), &[])
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn files_of_the_kernel_can_be_read() {
    let agent = Agent::start().await;
    let read = agent.get(&files("/proc/self/status"), &[]).await;
    assert!(read.body.starts_with(b"Name:"));
}

#[tokio::test]
async fn a_full_disk_is_507() {
    let agent = Agent::start().await;
    let mount = agent.home().join("small");
    fs::create_dir(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m,mode=777", "tmpfs"])
        .arg(&mount)
        .status()
        .unwrap();
    assert!(mounted.success());
    let known = agent.put("small/known", pattern(40 << 20)).await;
    let piece = Bytes::from(pattern(64 << 10));
    let pieces = stream::iter(
        (0..640).map(move |_| Ok::<_, std::io::Error>(hyper::body::Frame::data(piece.clone()))),
    );
    let body = BodyExt::boxed(StreamBody::new(pieces));
    let unknown = agent
        .send_body(Method::POST, &files("small/unknown"), &RAW, body)
        .await;
    let left = fs::read_dir(&mount).unwrap().count();
    let unmounted = std::process::Command::new("umount")
        .arg("-l")
        .arg(&mount)
        .status();
    assert!(unmounted.unwrap().success());
    assert_eq!(
        (known.status.as_u16(), unknown.status.as_u16(), left),
        (507, 507, 0)
    );
}

#[tokio::test]
async fn files_are_composed_in_order() {
    let agent = Agent::start().await;
    agent.put("1", "one ").await;
    agent.put("2", "two").await;
    let compose = async |body: serde_json::Value| {
        let headers = [RAW[0], ("content-type", "application/json")];
        agent
            .send(Method::POST, "/files/compose", &headers, body.to_string())
            .await
    };
    let right = json!({ "source_paths": ["1", "2", "1"], "destination": "out/all" });
    let answer = compose(right).await;
    assert_eq!(answer.json()["name"], "all");
    assert_eq!(
        fs::read(agent.home().join("out/all")).unwrap(),
        b"one twoone "
    );
    for (wrong, status) in [
        (
            json!({ "source_paths": ["1", "missing"], "destination": "x" }),
            404,
        ),
        (
            json!({ "source_paths": ["1", "2"], "destination": "1" }),
            400,
        ),
        (json!({ "source_paths": [], "destination": "x" }), 400),
        (json!({ "source_paths": ["1"], "destination": "" }), 400),
        (
            json!({ "source_paths": ["1"], "destination": "/root/x" }),
            403,
        ),
        (json!({ "destination": "x" }), 422),
    ] {
        assert_eq!(compose(wrong.clone()).await.status, status, "{wrong}");
    }
    assert_eq!(fs::read(agent.home().join("1")).unwrap(), b"one ");
}

#[tokio::test]
async fn a_signed_address_opens_its_file_and_no_other() {
    let agent = Agent::start().await;
    agent.put("s.txt", "signed").await;
    let token = Token::new(ACCESS_TOKEN.into());
    let address = |path: &str, operation, user: Option<&str>, end: Option<u64>| {
        let signature = sign(path, operation, user.unwrap_or(""), &token, end);
        let mut query = form_urlencoded::Serializer::new(String::new());
        query
            .append_pair("path", "s.txt")
            .append_pair("signature", &signature);
        if let Some(user) = user {
            query.append_pair("username", user);
        }
        if let Some(end) = end {
            query.append_pair("signature_expiration", &end.to_string());
        }
        format!("/files?{}", query.finish())
    };
    let get = async |address: String| agent.send(Method::GET, &address, &[], "").await;
    let far = Some(9_999_999_999);
    assert_eq!(
        get(address("s.txt", FileOperation::Read, None, None))
            .await
            .body,
        "signed"
    );
    assert_eq!(
        get(address("s.txt", FileOperation::Read, None, far))
            .await
            .status,
        200
    );
    for wrong in [
        address("other", FileOperation::Read, None, None),
        address("s.txt", FileOperation::Write, None, None),
        address("s.txt", FileOperation::Read, None, Some(1_000_000_000)),
        address("s.txt", FileOperation::Read, None, None) + "&username=root",
        files("s.txt"),
    ] {
        assert_eq!(get(wrong.clone()).await.status, 401, "{wrong}");
    }
    // A wrong token is refused even where the signature is right.
    let right = address("s.txt", FileOperation::Read, None, None);
    let both = agent
        .send(Method::GET, &right, &[("x-access-token", "wrong")], "")
        .await;
    assert_eq!(both.status, 401);
    let upload = address("s.txt", FileOperation::Write, None, None);
    let answer = agent.send(Method::POST, &upload, &RAW[1..], "new").await;
    assert_eq!(answer.status, 200);
    assert_eq!(fs::read(agent.home().join("s.txt")).unwrap(), b"new");
}
